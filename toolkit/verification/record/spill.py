"""Tensors of a recording in a file, from the moment they are read: a recorded command has no memory to spare for copies
of its model.

A tensor that was spilled is there as before, mapped from its file: the operating system reads what is used of it, and
may drop it again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

SMALL = 16_384
"""Bytes of a tensor that stays in memory, in the file of its dataclass."""
_ALIGNED = 64
_PLACE = {"spilled": int, "dtype": str, "shape": list}


class Spill:
    """A file of tensors, written as they come."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.bytes = 0
        self._places: dict[int, tuple[torch.Tensor, dict[str, Any]]] = {}
        """By address: a mapped tensor, which keeps its address to itself, and its place."""

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values, in the file; small tensors as they are. Raises OSError where there is no room for it."""
        tensor = tensor.detach().cpu().contiguous()
        size = tensor.numel() * tensor.element_size()
        if size < SMALL or self.place(tensor) is not None:
            return tensor
        if not self.bytes:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.unlink(missing_ok=True)  # not truncated: what was mapped of it stays
        begin = -(-self.bytes // _ALIGNED) * _ALIGNED
        with self.file.open("r+b" if self.bytes else "wb") as file:
            file.seek(begin)
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        self.bytes = begin + size
        place = {"spilled": begin, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        mapped = read(self.file, place)
        self._places[mapped.data_ptr()] = (mapped, place)
        return mapped

    def place(self, tensor: torch.Tensor) -> dict[str, Any] | None:
        """Where a whole tensor is in the file, as plain values; None if it is not."""
        mapped, place = self._places.get(tensor.data_ptr(), (None, None))
        return place if mapped is not None and mapped.shape == tensor.shape and mapped.dtype == tensor.dtype else None

    def forget(self) -> None:
        """Give the disk back."""
        self._places.clear()
        self.bytes = 0
        self.file.unlink(missing_ok=True)


def is_place(value: Any) -> bool:
    """Whether a plain value is the place of a tensor."""
    return isinstance(value, dict) and value.keys() == _PLACE.keys()


def read(file: Path, place: dict[str, Any]) -> torch.Tensor:
    """The tensor at a place, mapped. What is written to it stays in this process. Raises ValueError where the file has
    no such place."""
    if any(type(place[key]) is not kind for key, kind in _PLACE.items()):
        raise ValueError("a tensor's place cannot be read")
    dtype, shape, begin = getattr(torch, place["dtype"], None), place["shape"], place["spilled"]
    if not isinstance(dtype, torch.dtype) or any(type(size) is not int or size < 0 for size in shape) or begin < 0:
        raise ValueError("a tensor's place cannot be read")
    count = int(np.prod(shape, dtype=object)) * torch.empty((), dtype=dtype).element_size()
    if not file.is_file() or begin + count > file.stat().st_size:
        raise ValueError(f"{file.name} is shorter than its trace says, or missing")
    raw = np.memmap(file, dtype=np.uint8, mode="c", offset=begin, shape=(count,))
    return torch.from_numpy(raw).view(dtype).view(shape)
