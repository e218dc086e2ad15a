"""Chunks made when they are asked for are torch's."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty

from rehearsal.chunks import Chunks


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 20])
@pytest.mark.parametrize("length", [1, 3, 7, 8, 16, 17])
def test_they_are_torchs(length: int, ranks: int, dim: int) -> None:
    whole = torch.arange(length * (length + 1)).view(length, length + 1)
    right, found = _chunk_with_empty(whole, ranks, dim), Chunks(whole, ranks, dim)
    assert len(found) == ranks
    for one, other in zip(right, found, strict=True):
        assert one.equal(other)
        assert one.shape == other.shape
