"""Which part of a data sheet's rates training reaches, by device: fitted to published runs, none measured by this
project. ``python -m benchmarks.outside`` fits them again; docs/measurements/outside.md has every run."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Reached:
    """``products``, ``attention``: parts of the bf16 rate that matrix products and flash attention reach.
    ``bandwidth``: the part of the memory's. ``handled``: bytes of memory traffic with each byte that is sent while a
    device computes. ``low``, ``high``: measured by predicted seconds of a step, of eight in ten
    rows that were fitted to, or of all, where these are less than ten.
    ``between_nodes``: GB/s per direction that link a node to the others, assumed: what the maker's own system has."""

    products: float
    attention: float
    bandwidth: float
    handled: float
    low: float
    high: float
    between_nodes: float


AMPERE = Reached(0.86, 0.32, 0.66, 8.9, 0.95, 1.06, 200)
"""59 of 117 runs on A100s of 80 GB. DGX A100: eight adapters of 200 Gb/s."""
HOPPER = Reached(0.67, 0.17, 0.66, 8.9, 0.90, 1.08, 400)
"""Five of 16 runs on H100s, with memory and traffic of the A100's. DGX H100: eight adapters of 400 Gb/s."""
ELSEWHERE = Reached(0.86, 0.32, 0.66, 8.9, 0.78, 1.27, 25)
"""An A100's parts; the interval is of nine of 19 runs on L40S, RTX 3090 and RTX 4090. One adapter of 200 Gb/s."""


def reached(device: str) -> Reached:
    """What is reached on a device of the table (toolkit/planning/hardware.py), by its name."""
    if device.startswith("a100"):
        return AMPERE
    if device.startswith("h100"):
        return HOPPER
    if device.startswith(("h200", "gh200", "b200", "b300")):
        return replace(HOPPER, low=ELSEWHERE.low, high=ELSEWHERE.high)
    return ELSEWHERE
