"""Which part of a data sheet's rates training reaches, by device: fitted to published runs, none measured by this
project. ``python -m benchmarks.outside`` fits them again; docs/measurements/outside.md has every run. Attention's rates
are in toolkit/planning/attention_rates.py."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Reached:
    """``products``: the part of the bf16 rate that matrix products reach.
    ``bandwidth``: the part of the memory's. ``handled``: bytes of memory traffic with each byte that is sent while a
    device computes. ``low``, ``high``: measured by predicted seconds of a step, of eight in ten of the device's rows,
    in which every source counts the same.
    ``between_nodes``: GB/s per direction that link a node to the others, assumed: what the maker's own system has."""

    products: float
    bandwidth: float
    handled: float
    low: float
    high: float
    between_nodes: float


AMPERE = Reached(0.78, 0.62, 4.7, 0.95, 1.11, 200)
"""59 of 117 runs on A100s of 80 GB. DGX A100: eight adapters of 200 Gb/s."""
HOPPER = Reached(0.59, 0.62, 4.7, 0.66, 1.38, 400)
"""Five of 16 runs on H100s, with memory and traffic of the A100's. DGX H100: eight adapters of 400 Gb/s. The interval
is that of the 59 runs on all devices but the A100."""
ELSEWHERE = replace(AMPERE, low=HOPPER.low, high=HOPPER.high, between_nodes=25)
"""An A100's parts. One adapter of 200 Gb/s."""

MATMUL = {
    "a100": 0.848,  # 264.5 of 312
    "h100": 0.798,  # 789.2 of 989
    "b200": 0.754,  # 1,696 of 2,250
    "rtx30": 1.08,  # RTX 3090: 76.5 of 71; the sheet's clock is below the one that it runs at
    "rtx40": 0.99,  # RTX 4090: 163.1 of 165.2
    "rtx50": 1.13,  # RTX 5090: 236 of 209.5
    "v100": 0.71,  # V100S, fp16: 88.9 of 125
    "t4": 0.42,  # two matrices of 8,192 in 0.04 s, 27.5 of 65: github.com/m4rs-mt/ILGPU/pull/658
}
"""The part of a data sheet's rate that a large product alone reaches: github.com/zzc0721/torch-performance-test-data,
database.md, one script on all devices but the T4, the median where several measured one."""


def reached(device: str) -> Reached:
    """What is reached on a device of the table (toolkit/planning/hardware.py), by its name: where no run was fitted to,
    products reach so much of a large one's rate as they do on an A100, and on a B200 or B300 as on an H100."""
    if device.startswith("a100"):
        return AMPERE
    if device.startswith(("h100", "h200", "gh200")):
        return HOPPER
    if device.startswith(("b200", "b300")):
        return replace(HOPPER, products=HOPPER.products * MATMUL["b200"] / MATMUL["h100"])
    alone = of_large_products(device)
    return replace(ELSEWHERE, products=AMPERE.products * alone / MATMUL["a100"])


def of_large_products(device: str) -> float:
    """``MATMUL`` of a device; an A100's where it has none."""
    return next((part for name, part in MATMUL.items() if device.startswith(name)), MATMUL["a100"])
