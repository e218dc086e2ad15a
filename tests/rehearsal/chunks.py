"""FSDP2's division of a weight into as many views as there are ranks, of which it takes one or two: here only those
are made. A thousand ranks and 1,700 weights are 3.5 million views, each of which goes through Python in a rehearsal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param


class Chunks(Sequence[torch.Tensor]):
    """What torch 2.13.0's ``_chunk_with_empty`` (_fsdp_common.py) lists, each made when it is asked for."""

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, num_chunks, dim

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if index >= self._count:
            raise IndexError(index)
        length = self._tensor.size(self._dim)
        each = -(-length // self._count)
        start = min(index * each, length)
        if start == length:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(each, length - start))


@contextlib.contextmanager
def made_when_asked() -> Iterator[None]:
    with mock.patch.object(_fsdp_param, "_chunk_with_empty", Chunks):
        yield
