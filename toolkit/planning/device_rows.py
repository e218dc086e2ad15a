"""The rows of the device table. Imports nothing.

Memory is what PyTorch says that it may use («GPU 0 has a total capacity of …»), less than the data sheet's round
number: the driver keeps some, and error correction takes a sixteenth of GDDR6. Where only the driver's own total
(nvidia-smi) was found, 0.6 GiB are taken off; where both were found they differ by 0.46 to 0.57. GeForce cards
without a source of their own have 0.978 of the round number, as those with one (0.975 to 0.980).

A source in brackets is where a row's numbers were read, since data sheets themselves could not be; «unchecked» is
what no source was found for. Rates: dense; of 16 bits with float32 accumulation, of fp32 without TF32, which torch
has off.
"""

from __future__ import annotations

# Name, memory in GiB, TFLOP/s in bf16 (0: the device has none) and in fp32, GB/s of its memory, of a link and of PCIe,
# and the source.
ROWS: list[tuple[str, float, float, float, float, float, float, str]] = [
    ("b200", 178.3, 2250, 75, 7672, 900, 64,
     "NVIDIA HGX B200 [memory, bandwidth: github.com/pytorch/ao/pull/4002; rate, NVLink: "
     "glennklockwood.com/garden/processors/B200; PCIe as H100, unchecked]"),
    ("h200", 139.8, 989, 67, 4800, 450, 64,
     "NVIDIA H200 SXM [rate, bandwidth: github.com/meta-pytorch/tritonbench/issues/78; links: "
     "saulelectric.com/nvidia-h200.html; memory unchecked]"),
    ("h100", 79.1, 989, 67, 3350, 450, 64,
     "NVIDIA H100 SXM5 [memory: github.com/vllm-project/vllm/issues/27508; rate, bandwidth: "
     "github.com/meta-pytorch/tritonbench/issues/78; links: saulelectric.com/nvidia-h200.html]"),
    ("h100-pcie", 79.1, 756, 51.2, 2000, 64, 64,
     "NVIDIA H100 PCIe [bandwidth, PCIe: product brief PB-11133-001; rate unchecked; memory as the SXM5's]"),
    ("a100-80gb", 79.4, 312, 19.5, 2039, 300, 32,
     "NVIDIA A100 SXM4 80 GB [memory: github.com/NVIDIA/mig-parted/issues/31; others: "
     "glennklockwood.com/garden/processors/A100, from the data sheet]"),
    ("a100-80gb-pcie", 79.4, 312, 19.5, 1935, 32, 32,
     "NVIDIA A100 PCIe 80 GB [bandwidth, PCIe: thundercompute.com/blog/nvidia-a100-specs-full-guide; others as "
     "the SXM4's]"),
    ("a100-40gb", 39.4, 312, 19.5, 1555, 300, 32,
     "NVIDIA A100 SXM4 40 GB [memory: github.com/modal-labs/modal-client/pull/2797; others: "
     "glennklockwood.com/garden/processors/A100, from the data sheet]"),
    ("l40s", 44.4, 362, 91.6, 864, 32, 32,
     "NVIDIA L40S [memory: github.com/stepfun-ai/Step-Video-T2V/issues/8; others: mullet.se, product 355414, "
     "the data sheet's table]"),
    ("l4", 22, 121, 30.3, 300, 32, 32,
     "NVIDIA L4 [memory: github.com/ArcInstitute/evo2/issues/190; others: "
     "grokipedia.com/page/NVIDIA_L4_vs_L40S, half of the rate with sparsity]"),
    ("a10", 21.9, 125, 31.2, 600, 32, 32,
     "NVIDIA A10 [memory: github.com/modal-labs/modal-client/pull/2797; bandwidth: "
     "baseten.co/blog/nvidia-a10-vs-a10g-for-ml-model-inference; rate: four times FP32's 31.2, sysrqmts.com]"),
    ("rtx6000-ada", 44.4, 364, 91.1, 960, 32, 32,
     "NVIDIA RTX 6000 Ada, error correction on [memory: github.com/DINGYANB/MTVCrafter/issues/21; others: "
     "grafikkarten.com, rate four times FP32's 91.1]"),
    ("rtxa6000", 47.4, 155, 38.7, 768, 32, 32,
     "NVIDIA RTX A6000 [bandwidth, PCIe: servethehome.com, RTX A6000; rate: "
     "llmperf.net/categories/gpu/Nvidia-A6000-GPUs; memory unchecked]"),
    ("rtx5090", 31.3, 209.5, 104.8, 1792, 64, 64,
     "NVIDIA GeForce RTX 5090 [memory: github.com/Wan-Video/Wan2.1/issues/465; others: "
     "spheron.network/blog/nvidia-rtx-5090-specs, a quarter of FP16's 838 with sparsity and FP16 sums]"),
    ("rtx4090", 23.5, 165.2, 82.6, 1008, 32, 32,
     "NVIDIA GeForce RTX 4090 [memory: github.com/Soul-AILab/SoulX-FlashTalk/issues/5; others: "
     "waredb.com/processor/nvidia-geforce-rtx-4090]"),
    ("rtx3090", 23.4, 71, 35.6, 936, 32, 32,
     "NVIDIA GeForce RTX 3090 [memory: github.com/noonghunna/club-3090/issues/390; rate: twice FP32's 35.6; "
     "bandwidth unchecked]"),
    ("b300", 268, 2250, 75, 8000, 900, 128,
     "NVIDIA HGX B300, Blackwell Ultra [rates, bandwidth, links: glennklockwood.com/garden/processors/B300; "
     "memory: of 288 GB, unchecked]"),
    ("gh200", 95, 989, 67, 4000, 450, 450,
     "NVIDIA GH200, 96 GB HBM3 [rates as the H200's; NVLink-C2C to the host: "
     "spheron.network/blog/nvidia-gh200-guide; bandwidth: data sheet, unchecked; memory: 97871 MiB in "
     "nvidia-smi, unchecked]"),
    ("gh200-144gb", 143, 989, 67, 4900, 450, 450,
     "NVIDIA GH200, 144 GB HBM3e [bandwidth: data sheet, unchecked; others as gh200; memory unchecked]"),
    ("mi300x", 191.9, 1307, 163.4, 5300, 448, 64,
     "AMD Instinct MI300X data sheet [rates: hmc-tech.com/gpu/nvidia-b200-vs-amd-instinct-mi300x; bandwidth: "
     "rooflinenotes.dev/accelerators; seven links of 64 GB/s; memory: 192 GB are GiB here, unchecked]"),
    ("l40", 44.4, 181, 90.5, 864, 32, 32,
     "NVIDIA L40 data sheet [rates unchecked; memory as the L40S]"),
    ("a40", 44.4, 149.7, 37.4, 696, 32, 32,
     "NVIDIA A40 data sheet [rate, bandwidth: github.com/astroC86/gpu-datasheet; fp32: a quarter; memory as 48 "
     "GB of GDDR6 with error correction]"),
    ("a10g", 21.9, 70, 35, 600, 32, 32,
     "NVIDIA A10G data sheet of AWS [bandwidth: baseten.co/blog/nvidia-a10-vs-a10g-for-ml-model-inference; "
     "bf16: twice TF32's 35, of the same table; memory as the A10]"),
    ("t4", 14.56, 0, 8.1, 320, 16, 16,
     "NVIDIA T4 data sheet [rates, bandwidth: hmc-tech.com/gpu/nvidia-t4-vs-nvidia-v100-sxm, sysrqmts.com; "
     "memory: github.com/Anassbzdd/fitcheck; PCIe 3.0 x16]"),
    ("v100-16gb", 15.77, 0, 15.7, 900, 150, 16,
     "NVIDIA V100 SXM2 data sheet [rates: github.com/winston-zhang-orz/gpu-specs; NVLink: six links of 25 "
     "GB/s; memory unchecked]"),
    ("v100-32gb", 31.74, 0, 15.7, 900, 150, 16,
     "NVIDIA V100 SXM2 data sheet [memory: github.com/liucongg/ChatGLM-Finetuning/issues/73; others as "
     "v100-16gb]"),
    ("rtx3060", 11.76, 25.5, 12.7, 360, 32, 32,
     "NVIDIA GeForce RTX 3060 [memory: github.com/TencentARC/PhotoMaker/issues/47; rate: twice FP32's, as of "
     "the RTX 3090; bandwidth unchecked]"),
    ("rtx3060ti", 7.82, 32.4, 16.2, 448, 32, 32,
     "NVIDIA Ampere GA102 whitepaper, appendix A [GeForce RTX 3060 Ti; unchecked]"),
    ("rtx3070", 7.82, 40.6, 20.3, 448, 32, 32,
     "NVIDIA Ampere GA102 whitepaper, appendix A [GeForce RTX 3070; unchecked]"),
    ("rtx3070ti", 7.82, 43.5, 21.7, 608, 32, 32,
     "NVIDIA Ampere GA102 whitepaper, appendix A [GeForce RTX 3070 Ti; unchecked]"),
    ("rtx3080", 9.78, 59.5, 29.8, 760, 32, 32,
     "NVIDIA Ampere GA102 whitepaper, appendix A [GeForce RTX 3080 10 GB; memory: "
     "github.com/zai-org/CogVideo/issues/34; others unchecked]"),
    ("rtx3080-12gb", 11.74, 61.3, 30.6, 912, 32, 32,
     "NVIDIA GeForce RTX 3080 12 GB [FP32, bandwidth: sysrqmts.com; rate: twice]"),
    ("rtx3080ti", 11.74, 68.2, 34.1, 912, 32, 32,
     "NVIDIA Ampere GA102 whitepaper, appendix A [GeForce RTX 3080 Ti; unchecked]"),
    ("rtx3090ti", 23.4, 80, 40, 1008, 32, 32,
     "NVIDIA Ampere GA102 whitepaper, appendix A [GeForce RTX 3090 Ti; memory as the RTX 3090; others "
     "unchecked]"),
    ("rtx4060", 7.82, 30.2, 15.1, 272, 16, 16,
     "NVIDIA Ada whitepaper, appendix A [GeForce RTX 4060; bandwidth: guru3d.com; PCIe 4.0 x8; others "
     "unchecked]"),
    ("rtx4060ti", 7.82, 44.1, 22.1, 288, 16, 16,
     "NVIDIA Ada whitepaper, appendix A [GeForce RTX 4060 Ti 8 GB; bandwidth: guru3d.com; PCIe 4.0 x8; others "
     "unchecked]"),
    ("rtx4060ti-16gb", 15.65, 44.1, 22.1, 288, 16, 16,
     "NVIDIA Ada whitepaper, appendix A [GeForce RTX 4060 Ti 16 GB; as that of 8 GB]"),
    ("rtx4070", 11.74, 58.3, 29.1, 504, 32, 32,
     "NVIDIA Ada whitepaper, appendix A [GeForce RTX 4070; rates: ctc.archdevil.net; bandwidth: guru3d.com]"),
    ("rtx4070super", 11.74, 71, 35.5, 504, 32, 32,
     "NVIDIA Ada whitepaper, appendix A [GeForce RTX 4070 SUPER; unchecked]"),
    ("rtx4070ti", 11.74, 80.2, 40.1, 504, 32, 32,
     "NVIDIA Ada whitepaper, appendix A [GeForce RTX 4070 Ti; FP32: gamegpu.com; bandwidth: guru3d.com]"),
    ("rtx4070tisuper", 15.65, 88.2, 44.1, 672, 32, 32,
     "NVIDIA Ada whitepaper, appendix A [GeForce RTX 4070 Ti SUPER; unchecked]"),
    ("rtx4080", 15.65, 97.4, 48.7, 717, 32, 32,
     "NVIDIA Ada whitepaper, appendix A [GeForce RTX 4080; rates: ctc.archdevil.net; bandwidth: guru3d.com]"),
    ("rtx4080super", 15.65, 104.4, 52.2, 736, 32, 32,
     "NVIDIA Ada whitepaper, appendix A [GeForce RTX 4080 SUPER; unchecked]"),
    ("rtx5060", 7.82, 38.4, 19.2, 448, 32, 32,
     "NVIDIA RTX Blackwell whitepaper, appendix A [GeForce RTX 5060; PCIe 5.0 x8; unchecked]"),
    ("rtx5060ti", 7.82, 47.4, 23.7, 448, 32, 32,
     "NVIDIA RTX Blackwell whitepaper, appendix A [GeForce RTX 5060 Ti 8 GB; PCIe 5.0 x8; unchecked]"),
    ("rtx5060ti-16gb", 15.65, 47.4, 23.7, 448, 32, 32,
     "NVIDIA RTX Blackwell whitepaper, appendix A [GeForce RTX 5060 Ti 16 GB; as that of 8 GB]"),
    ("rtx5070", 11.74, 61.7, 30.9, 672, 64, 64,
     "NVIDIA RTX Blackwell whitepaper, appendix A [GeForce RTX 5070; unchecked]"),
    ("rtx5070ti", 15.65, 87.9, 43.9, 896, 64, 64,
     "NVIDIA RTX Blackwell whitepaper, appendix A [GeForce RTX 5070 Ti; bandwidth: topcpu.net; others "
     "unchecked]"),
    ("rtx5080", 15.65, 112.6, 56.3, 960, 64, 64,
     "NVIDIA RTX Blackwell whitepaper, appendix A [GeForce RTX 5080; unchecked]"),
]  # fmt: skip

FP16 = {"t4": 65.0, "v100-16gb": 125.0, "v100-32gb": 125.0}
"""TFLOP/s in fp16 of devices where it is another than in bf16."""
