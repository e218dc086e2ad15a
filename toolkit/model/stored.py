"""Tensors in safetensors files, read by ranges: of a file no more is read than the elements that are asked for.

Files are read, not mapped: no page of them counts as memory of this process, and one that shrinks ends in an error
instead of a signal.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any

import torch

from toolkit.errors import InputError

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
           "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
           "BOOL": torch.bool}  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """One tensor of a file. ``begin``: its first byte."""

    file: Path
    name: str
    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Elements ``start`` to ``stop`` of the flattened tensor, flat. Raises InputError if the file is too short."""
        found = torch.empty(stop - start, dtype=self.dtype)
        with self.file.open("rb", buffering=0) as opened:
            missing = read_into(opened, self.begin + start * found.element_size(), found)
        if missing:
            raise InputError(f"{self.file}: {self.name}: the file ends {missing} bytes too early")
        return found


def read_into(opened: RawIOBase, begin: int, found: torch.Tensor) -> int:
    """Read from byte ``begin`` of a file until ``found``, contiguous, is full; returns how many bytes are missing."""
    rest = memoryview(found.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    opened.seek(begin)
    while rest and (read := opened.readinto(rest)):  # a read gives 2 GiB at most
        rest = rest[read:]
    return len(rest)


def header(opened: RawIOBase) -> tuple[int, dict[str, Any]]:
    """Of a safetensors file: the byte at which tensors begin, and dtype, shape and offsets from there by name."""
    size = int.from_bytes(opened.read(8) or b"", "little")
    content = json.loads(opened.read(size) or b"")
    return 8 + size, {name: one for name, one in content.items() if name != "__metadata__"}


def stored_in(files: Iterable[str | os.PathLike[str]]) -> dict[str, Stored]:
    """The tensors of several files by name. Raises KeyError for a dtype that is not read by ranges."""
    found = {}
    for path in map(Path, files):
        with path.open("rb", buffering=0) as opened:
            begin, tensors = header(opened)
        for name, one in tensors.items():
            dtype, shape = _DTYPES[one["dtype"]], tuple(one["shape"])
            found[name] = Stored(path, name, begin + one["data_offsets"][0], shape, dtype)
    return found
