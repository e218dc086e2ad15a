"""Chunks made when they are asked for are torch's."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty

from rehearsal.chunks import Chunks


def test_they_are_torchs(subtests: pytest.Subtests) -> None:
    for length in [1, 3, 7, 8, 16, 17]:
        for ranks in [1, 2, 3, 8, 20]:
            for dim in [0, 1]:
                with subtests.test(length=length, ranks=ranks, dim=dim):
                    whole = torch.arange(length * (length + 1)).view(length, length + 1)
                    right, found = _chunk_with_empty(whole, ranks, dim), Chunks(whole, ranks, dim)
                    assert len(found) == ranks
                    for one, other in zip(right, found, strict=True):
                        assert one.equal(other)
                        assert one.shape == other.shape
