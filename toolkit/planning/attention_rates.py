"""How fast kernels of attention are, by device, kernel, pass, head size and length: published measurements.

Every rate is of a causal kernel whose masked half is not counted, in 16 bits, with heads 128 wide. Between lengths
rates are interpolated over the logarithm; before the first length and beyond the last they stay, but for rows of less
than ``SHORT`` tokens, whose rate falls in proportion. A kernel without a mask is as fast as a causal one over rows
twice as long; the tables of the A100 and H200, which have both, say up to 11 % faster.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from toolkit.planning.reached import of_large_products
from toolkit.planning.work import Attention


@dataclass(frozen=True)
class Measured:
    """TFLOP/s by length, of a device whose data sheet has ``peak``. ``source``: where they were published."""

    peak: float
    forward: dict[int, float]
    backward: dict[int, float]
    source: str

    def part(self, kernel: Attention) -> float:
        """The part of the data sheet's rate that ``kernel`` reaches."""
        known = self.backward if kernel.backward else self.forward
        return _between(known, kernel.length * (1 if kernel.causal else 2)) / self.peak


_CUDNN = "github.com/NVIDIA/cudnn-frontend, benchmark/"
_FA3 = "FlashAttention-3, arXiv:2407.08608, figures of H100 SXM5 (as subtext.edge.nugit.net has their bars)"

TABLE: dict[tuple[str, str], Measured] = {
    ("ampere", "flash2"): Measured(
        312,
        {1024: 142, 2048: 180, 4096: 204, 8192: 217, 16384: 203, 32768: 199},
        {2048: 141, 4096: 168, 8192: 173, 16384: 175, 32768: 180},
        _CUDNN + "attention_training/results/llama3.1/a100/llama3.1_20260928_133751.csv, A100 80 GB PCIe; 1,024: "
        "github.com/liangan1/GPU_travel, performance/flash-attn/README.md",
    ),
    ("workstation", "flash2"): Measured(
        111,
        {1024: 84, 2048: 81, 4096: 81, 8192: 82, 16384: 82},
        {1024: 52.9, 2048: 62.5, 4096: 70.1, 8192: 74.8, 16384: 77.4},
        "RTX A5000, heads of 64, without a mask: github.com/gpu-mode/ring-attention/issues/10; peak four times FP32's "
        "27.8, as of the RTX A6000",
    ),
    ("geforce", "flash2"): Measured(
        165.2,
        {2048: 151.2, 4096: 169.3},
        {2048: 99.2, 4096: 124.6},
        "RTX 4090: github.com/apache/tvm, tl_doc/flash_perf.md; rows of 2,048, with and without a mask",
    ),
    ("hopper", "flash2"): Measured(
        989,
        {512: 191, 1024: 260, 2048: 298, 4096: 319, 8192: 333, 16384: 335},
        {1024: 214, 2048: 260, 4096: 291, 8192: 310, 16384: 318, 32768: 322},
        _FA3 + "; backward without a mask",
    ),
    ("hopper", "flash3"): Measured(
        989,
        {512: 292, 1024: 423, 2048: 521, 4096: 579, 8192: 602, 16384: 616},
        {1024: 316, 2048: 424, 4096: 501, 8192: 542, 16384: 559, 32768: 561},
        _FA3 + "; backward without a mask",
    ),
    ("hopper", "cudnn"): Measured(
        989,
        {512: 315, 1024: 410, 2048: 534, 4096: 616, 8192: 655, 16384: 633, 32768: 619},
        {1024: 305, 2048: 402, 4096: 495, 8192: 526, 16384: 539, 32768: 528},
        _CUDNN + "attention_training/results/llama3.1/h200/llama3.1_20260928_130009.csv; below 2,048: " + _FA3,
    ),
    ("blackwell", "flash2"): Measured(
        2250,
        {512: 64, 1024: 154, 2048: 254, 4096: 343, 8192: 400, 16384: 425, 32768: 436},
        {512: 81, 1024: 105, 2048: 199, 4096: 273, 8192: 318, 16384: 337, 32768: 346},
        _CUDNN + "sdpa_benchmark_training/artifacts/sdpa_bf16_benchmark_results_NVIDIA_B200.csv, flash_attention",
    ),
    ("blackwell", "cudnn"): Measured(
        2250,
        {512: 84, 1024: 255, 2048: 479, 4096: 856, 8192: 1171, 16384: 1332, 32768: 1419},
        {512: 134, 1024: 309, 2048: 371, 4096: 701, 8192: 943, 16384: 1075, 32768: 1109},
        _CUDNN + "sdpa_benchmark_training/artifacts/sdpa_bf16_benchmark_results_NVIDIA_B200.csv, pyt_cudnn",
    ),
    ("mi300x", "flash2"): Measured(
        1307,
        {32768: 353},
        {32768: 194},
        "MI300X, rows of 16,384 without a mask: github.com/ROCm/flash-attention/issues/142",
    ),
}  # fmt: skip
"""By family of devices and kernel. Volta and Turing have no flash kernel (`_kernel`)."""

SLOWER = {
    "flash1": 0.5,  # FlashAttention-2 is around twice as fast: arXiv:2307.08691, abstract
    "torch": 0.94,  # torch's copy: 6.55 against 6.14 ms at 16,384 tokens, github.com/pytorch/benchmark/pull/2443
    "efficient": 0.4,
}
"""Kernels by their part of FlashAttention-2's rate. ``efficient``: torch's memory-efficient one. Steps of a Llama 3.2
1B on an H200 (NVIDIA/cudnn-frontend, benchmark/Llama-3.2-1B-Training/artifacts/h200_training_timing.csv) take so much
longer with it than with flash that it has 0.38 to 0.42 of that one's rate (2,048 to 16,384 tokens, the rates of
``TABLE``); forward it has 0.43 at 8,192 tokens and 0.46 at 1,024 (github.com/NVIDIA/TileGym/pull/49)."""

SHORT = 512
"""Tokens below which no table has a rate."""

NARROW = {"flash2": (0.89, 0.90), "flash3": (0.77, 0.84), "cudnn": (0.72, 0.84)}
"""Forward and backward of heads 64 wide by those of 128, at 16,384 tokens on an H100: FlashAttention-3's figures.
Widths between follow a straight line, and wider heads are as fast as those of 128."""


def family(device: str) -> str:
    """What a device of the table is measured like, by its name."""
    if device.startswith(("t4", "v100")):
        return "turing"
    if device.startswith("a100"):
        return "ampere"
    if device.startswith(("h100", "h200", "gh200")):
        return "hopper"
    if device.startswith(("b200", "b300")):
        return "blackwell"
    if device == "mi300x":
        return device
    return "geforce" if device.startswith(("rtx30", "rtx40", "rtx50")) else "workstation"


def part(kernel: Attention, device: str, attention: str | None) -> float:
    """The part of the data sheet's rate that a kernel of a trace reaches on ``device`` where a recipe has
    ``attention`` (``model.attention``)."""
    kind = family(device)
    name = _kernel(kernel.name, kind, attention)
    own = name if (kind, name) in TABLE else "flash2"
    measured = TABLE["ampere" if kind == "turing" else kind, own]
    narrow = NARROW[own][kernel.backward]
    width = 1 - (1 - narrow) * min(1.0, max(0.0, (128 - kernel.width) / 64))
    # A T4 and a V100 have an A100's part of what large products reach: neither keeps up its data sheet's clock.
    clock = of_large_products(device) / of_large_products("a100") if kind == "turing" else 1.0
    return measured.part(kernel) * width * clock * SLOWER.get(name, 1.0)


def _kernel(traced: str, kind: str, attention: str | None) -> str:
    """What runs for a kernel of a trace. torch's own choice prefers cuDNN's kernel on Hopper and datacenter Blackwell
    from 2.11 on (github.com/huggingface/transformers/pull/48163); before Ampere it has no flash kernel."""
    if traced == "flash1":
        return traced
    if traced == "efficient" or kind == "turing":
        return "efficient"
    if attention == "flash_attention_3":
        return "flash3"
    if attention in (None, "sdpa"):
        return "cudnn" if (kind, "cudnn") in TABLE else "torch"
    return "flash2"


def _between(known: dict[int, float], length: int) -> float:
    lengths = sorted(known)
    if length <= lengths[0]:
        return known[lengths[0]] * min(1.0, max(length, 1) / SHORT)
    for low, high in itertools.pairwise(lengths):
        if length <= high:
            along = math.log(length / low) / math.log(high / low)
            return known[low] + along * (known[high] - known[low])
    return known[lengths[-1]]
