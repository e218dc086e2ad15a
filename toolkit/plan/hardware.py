"""Devices that plans are made for: what vendors' data sheets say, and a file in which users add their own.

Nothing in the table was measured here. Rates are dense (without sparsity), bf16 with float32 accumulation.
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
    """``memory``: GiB. ``bf16``: TFLOP/s. ``bandwidth``: GB/s of device memory. ``link``: GB/s per direction to
    the other devices of a node. ``pcie``: GB/s per direction to the host. ``source``: where that is written."""

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


def _table() -> dict[str, Device]:
    rows: list[tuple[str, float, float, float, float, float, str]] = [
        ("b200", 180, 2250, 7700, 900, 64, "NVIDIA HGX B200 data sheet"),
        ("h200", 141, 989, 4800, 450, 64, "NVIDIA H200 data sheet (SXM)"),
        ("h100", 80, 989, 3350, 450, 64, "NVIDIA H100 data sheet (SXM5)"),
        ("h100-pcie", 80, 756, 2000, 64, 64, "NVIDIA H100 data sheet (PCIe)"),
        ("a100-80gb", 80, 312, 2039, 300, 32, "NVIDIA A100 data sheet (SXM4 80 GB)"),
        ("a100-80gb-pcie", 80, 312, 1935, 32, 32, "NVIDIA A100 data sheet (PCIe 80 GB)"),
        ("a100-40gb", 40, 312, 1555, 300, 32, "NVIDIA A100 data sheet (SXM4 40 GB)"),
        ("l40s", 48, 362, 864, 32, 32, "NVIDIA L40S data sheet"),
        ("l4", 24, 121, 300, 32, 32, "NVIDIA L4 data sheet"),
        ("a10", 24, 125, 600, 32, 32, "NVIDIA A10 data sheet"),
        ("rtx6000-ada", 48, 364, 960, 32, 32, "NVIDIA RTX 6000 Ada data sheet"),
        ("rtxa6000", 48, 155, 768, 32, 32, "NVIDIA RTX A6000 data sheet"),
        ("rtx5090", 32, 209.5, 1792, 64, 64, "NVIDIA RTX Blackwell architecture paper, table of GeForce RTX 5090"),
        ("rtx4090", 24, 165.2, 1008, 32, 32, "NVIDIA Ada architecture paper, table of GeForce RTX 4090"),
        ("rtx3090", 24, 71, 936, 32, 32, "NVIDIA Ampere GA102 architecture paper, table of GeForce RTX 3090"),
    ]
    return {row[0]: Device(*row) for row in rows}


def devices(extra: str | None = None) -> dict[str, Device]:
    """The table by name, with the rows of a user's YAML file (name: {memory, bf16, bandwidth, link, pcie}) over it.

    Raises InputError where the file cannot be read or a row lacks a number.
    """
    table = _table()
    if extra is None:
        return table
    try:
        rows = yaml.safe_load(Path(extra).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise InputError(f"{extra}: {str(error).splitlines()[0]}") from None
    if not isinstance(rows, dict):
        raise InputError(f"{extra}: a mapping of names to {{memory, bf16, bandwidth, link, pcie}} was expected")
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
    """The device that a user names, or one of so much memory (GiB) and otherwise unknown rates.

    Raises InputError for a name that is not in the table, naming the nearest.
    """
    table = devices(extra)
    if name is None:
        assert memory is not None
        return Device(f"{memory:g} GiB", memory, 0, 0, 0, 0, "given on the command line")
    found = table.get(name.lower().replace(" ", "").replace("_", "-"))
    if found is None:
        near = difflib.get_close_matches(name.lower(), table, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InputError(
            f"--gpu {name}: not in the table{hint} Known: {', '.join(table)}. "
            "Another: --memory GIB, or --gpu-table FILE with its numbers"
        )
    return replace(found, memory=memory) if memory else found
