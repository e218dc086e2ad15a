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
from toolkit.planning.device_rows import FP16, ROWS

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """``memory``: GiB that PyTorch may use. ``bf16``: TFLOP/s; 0: it has none, or it is not known. ``bandwidth``: GB/s
    of device memory. ``link``: GB/s per direction to the other devices of a node. ``pcie``: GB/s per direction to the
    host. ``source``: where that is written. ``fp16``: TFLOP/s, None: as ``bf16``. ``fp32``: without TF32, None: half of
    ``bf16``."""

    name: str
    memory: float
    bf16: float
    bandwidth: float
    link: float
    pcie: float
    source: str
    fp16: float | None = None
    fp32: float | None = None

    def rate(self, dtype: str) -> float:
        """Dense TFLOP/s of matrix products in a dtype of torch's name; 0 where it is not known, or not there."""
        if dtype == "float32":
            return self.bf16 / 2 if self.fp32 is None else self.fp32
        return self.fp16 if dtype == "float16" and self.fp16 is not None else self.bf16

    def lacks(self, dtype: str) -> bool:
        """Whether the device computes, but not in ``dtype``: bfloat16 came after Volta and Turing."""
        return not self.rate(dtype) and self.rate("float32") > 0

    def in_tf32(self) -> Device:
        """The device with products of float32 in TF32, at half of bf16's rate: A100 156 of 312, H100 494.7 of 989,
        MI300X 653.7 of 1,307 TFLOP/s (data sheets); taken for all others. Unchanged where it has no bf16."""
        return replace(self, fp32=self.bf16 / 2) if self.bf16 else self

    @property
    def bytes(self) -> int:
        return int(self.memory * GIB)


def _table() -> dict[str, Device]:
    return {
        name: Device(name, memory, bf16, bandwidth, link, pcie, source, FP16.get(name), fp32)
        for name, memory, bf16, fp32, bandwidth, link, pcie, source in ROWS
    }


def devices(extra: str | Path | None = None) -> dict[str, Device]:
    """The table by name, with the rows of a user's YAML file (name: {memory, bf16, bandwidth, link, pcie}, and fp16,
    fp32 where they are others) over it.

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
        table[str(name).lower()] = _row(str(extra), str(name).lower(), row)
    return table


def _row(file: str, name: str, row: Any) -> Device:
    keys = ("memory", "bf16", "bandwidth", "link", "pcie")
    more = [key for key in ("fp16", "fp32") if isinstance(row, dict) and key in row]
    if not isinstance(row, dict) or any(not _positive(row.get(key)) for key in (*keys, *more)):
        raise InputError(f"{file}: {name}: needs {', '.join(keys)} as numbers above 0 (GiB, TFLOP/s, GB/s)")
    if unknown := sorted(set(row) - {*keys, *more, "source"}):
        raise InputError(f"{file}: {name}: unknown key {unknown[0]}")
    numbers = {key: float(row[key]) for key in (*keys, *more)}
    return Device(name=name, **numbers, source=str(row.get("source", file)))


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def device_named(name: str | None, memory: float | None, extra: str | Path | None = None) -> Device:
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
