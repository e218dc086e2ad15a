"""The device table, each number with its source, and a file format for more devices.

This project measured none of these numbers. Rates are dense (without sparsity), bf16 with float32 accumulation.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from toolkit.errors import InputError

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """``memory``: GiB that PyTorch may use. ``bf16``: TFLOP/s. ``bandwidth``: GB/s of device memory. ``link``: GB/s
    per direction to the other devices of a node. ``pcie``: GB/s per direction to the host. ``source``: where that is
    written."""

    name: str
    memory: float
    bf16: float
    bandwidth: float
    link: float
    pcie: float
    source: str

    @property
    def bytes(self) -> int:
        return int(self.memory * GIB)


# Memory is what PyTorch says that it may use («GPU 0 has a total capacity of …»), less than the data sheet's round
# number: the driver keeps some, and error correction takes a sixteenth of GDDR6. Where only the driver's own total
# (nvidia-smi) was found, 0.6 GiB are taken off; where both were found they differ by 0.46 to 0.57.
# A source in brackets is where a row's numbers were read, since data sheets themselves could not be; «unchecked» is
# what no source was found for.
def _table() -> dict[str, Device]:
    rows: list[tuple[str, float, float, float, float, float, str]] = [
        ("b200", 178.3, 2250, 7672, 900, 64, "NVIDIA HGX B200 [memory, bandwidth: github.com/pytorch/ao/pull/4002; "
         "rate, NVLink: glennklockwood.com/garden/processors/B200; PCIe as H100, unchecked]"),
        ("h200", 139.8, 989, 4800, 450, 64, "NVIDIA H200 SXM [rate, bandwidth: github.com/meta-pytorch/tritonbench/"
         "issues/78; links: saulelectric.com/nvidia-h200.html; memory unchecked]"),
        ("h100", 79.1, 989, 3350, 450, 64, "NVIDIA H100 SXM5 [memory: github.com/vllm-project/vllm/issues/27508; rate, "
         "bandwidth: github.com/meta-pytorch/tritonbench/issues/78; links: saulelectric.com/nvidia-h200.html]"),
        ("h100-pcie", 79.1, 756, 2000, 64, 64, "NVIDIA H100 PCIe [bandwidth, PCIe: product brief PB-11133-001; "
         "rate unchecked; memory as the SXM5's]"),
        ("a100-80gb", 79.4, 312, 2039, 300, 32, "NVIDIA A100 SXM4 80 GB [memory: github.com/NVIDIA/mig-parted/issues/31"
         "; others: glennklockwood.com/garden/processors/A100, from the data sheet]"),
        ("a100-80gb-pcie", 79.4, 312, 1935, 32, 32, "NVIDIA A100 PCIe 80 GB [bandwidth, PCIe: thundercompute.com/blog/"
         "nvidia-a100-specs-full-guide; others as the SXM4's]"),
        ("a100-40gb", 39.4, 312, 1555, 300, 32, "NVIDIA A100 SXM4 40 GB [memory: github.com/modal-labs/modal-client/"
         "pull/2797; others: glennklockwood.com/garden/processors/A100, from the data sheet]"),
        ("l40s", 44.4, 362, 864, 32, 32, "NVIDIA L40S [memory: github.com/stepfun-ai/Step-Video-T2V/issues/8; others: "
         "mullet.se, product 355414, the data sheet's table]"),
        ("l4", 22.0, 121, 300, 32, 32, "NVIDIA L4 [memory: github.com/ArcInstitute/evo2/issues/190; others: "
         "grokipedia.com/page/NVIDIA_L4_vs_L40S, half of the rate with sparsity]"),
        ("a10", 21.9, 125, 600, 32, 32, "NVIDIA A10 [memory: github.com/modal-labs/modal-client/pull/2797; bandwidth: "
         "baseten.co/blog/nvidia-a10-vs-a10g-for-ml-model-inference; rate: four times FP32's 31.2, sysrqmts.com]"),
        ("rtx6000-ada", 44.4, 364, 960, 32, 32, "NVIDIA RTX 6000 Ada, error correction on [memory: github.com/DINGYANB/"
         "MTVCrafter/issues/21; others: grafikkarten.com, rate four times FP32's 91.1]"),
        ("rtxa6000", 47.4, 155, 768, 32, 32, "NVIDIA RTX A6000 [bandwidth, PCIe: servethehome.com, RTX A6000; rate: "
         "llmperf.net/categories/gpu/Nvidia-A6000-GPUs; memory unchecked]"),
        ("rtx5090", 31.3, 209.5, 1792, 64, 64, "NVIDIA GeForce RTX 5090 [memory: github.com/Wan-Video/Wan2.1/issues/465"
         "; others: spheron.network/blog/nvidia-rtx-5090-specs, a quarter of FP16's 838 with sparsity and FP16 sums]"),
        ("rtx4090", 23.5, 165.2, 1008, 32, 32, "NVIDIA GeForce RTX 4090 [memory: github.com/Soul-AILab/SoulX-FlashTalk/"
         "issues/5; others: waredb.com/processor/nvidia-geforce-rtx-4090]"),
        ("rtx3090", 23.4, 71, 936, 32, 32, "NVIDIA GeForce RTX 3090 [memory: github.com/noonghunna/club-3090/issues/390"
         "; rate: twice FP32's 35.6; bandwidth unchecked]"),
    ]  # fmt: skip
    return {row[0]: Device(*row) for row in rows}


def devices(extra: str | None = None) -> dict[str, Device]:
    """The table by name, with the rows of a user's YAML file (name: {memory, bf16, bandwidth, link, pcie}) over it.

    Raises InputError if the file cannot be read or a row lacks a number.
    """
    table = _table()
    if extra is None:
        return table
    try:
        rows = yaml.safe_load(Path(extra).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise InputError(f"{extra}: {str(error).splitlines()[0]}") from None
    if not isinstance(rows, dict):
        raise InputError(f"{extra}: a mapping of names to {{memory, bf16, bandwidth, link, pcie}} is expected")
    for name, row in rows.items():
        table[str(name).lower()] = _row(extra, str(name).lower(), row)
    return table


def _row(file: str, name: str, row: Any) -> Device:
    keys = ("memory", "bf16", "bandwidth", "link", "pcie")
    if not isinstance(row, dict) or any(not _positive(row.get(key)) for key in keys):
        raise InputError(f"{file}: {name}: needs {', '.join(keys)} as numbers above 0 (GiB, TFLOP/s, GB/s)")
    if unknown := sorted(set(row) - {*keys, "source"}):
        raise InputError(f"{file}: {name}: unknown key {unknown[0]}")
    numbers = {key: float(row[key]) for key in keys}
    return Device(name=name, **numbers, source=str(row.get("source", file)))


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def device_named(name: str | None, memory: float | None, extra: str | None = None) -> Device:
    """The named device, or one with this memory (GiB) and unknown rates. Raises InputError, with the closest name, for
    a name that is not in the table."""
    table = devices(extra)
    if name is None:
        assert memory is not None
        return Device(f"{memory:g} GiB", memory, 0, 0, 0, 0, "from the command line")
    found = table.get(name.lower().replace(" ", "").replace("_", "-"))
    if found is None:
        near = difflib.get_close_matches(name.lower(), table, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise InputError(
            f"--gpu {name}: not in the table{hint} Known: {', '.join(table)}. "
            "For another device: --memory GIB, or --gpu-table FILE; for host memory: --gpu cpu"
        )
    return replace(found, memory=memory) if memory else found
