"""Chunks made when they are asked for are torch's."""

from __future__ import annotations

from itertools import product

import torch
from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty

from cases import every_case
from rehearsal.chunks import Chunks


@every_case(("length", "ranks", "dim"), product([1, 3, 7, 8, 16, 17], [1, 2, 3, 8, 20], [0, 1]))
def test_they_are_torchs(length: int, ranks: int, dim: int) -> None:
    whole = torch.arange(length * (length + 1)).view(length, length + 1)
    right, found = _chunk_with_empty(whole, ranks, dim), Chunks(whole, ranks, dim)
    assert len(found) == ranks
    for one, other in zip(right, found, strict=True):
        assert one.equal(other)
        assert one.shape == other.shape
