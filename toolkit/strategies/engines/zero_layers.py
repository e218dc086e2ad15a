"""``strategy.mesh.tensor`` under ZeRO 1 and 2: each rank's parts of layers are sharded over the ranks that have them.

DeepSpeed is given the two groups of ranks as Megatron-LM gives its own (``mpu``). It averages and shards over those
that hold the same parts, and adds up the norm over those that divide the layers. Its own AutoTP is not used: it drops
adapters (docs/findings.md).
"""

from __future__ import annotations

import functools
from unittest import mock

import torch.distributed as dist
from torch import nn

from toolkit.recipe.resolve import Resolved
from toolkit.strategies.engines.claims import Claim
from toolkit.strategies.engines.layers import DividedLayers
from toolkit.strategies.engines.prepared import Prepared
from toolkit.strategies.engines.zero import ZeroEngine


class DividedZeroEngine(DividedLayers, ZeroEngine):
    """To DeepSpeed a part is a weight of its own, whose norm counts on every rank."""

    def engage(self, prepared: Prepared) -> None:
        import deepspeed

        _mark([p for name, p in prepared.model.named_parameters() if name in self.divisions])
        groups = _Groups(prepared.resolved, self.layer_group, self.state_group)
        given = functools.partial(deepspeed.initialize, mpu=groups)
        with mock.patch.object(deepspeed, "initialize", given):  # accelerate 1.15.0 has no way to pass it on
            super().engage(prepared)

    def evidence(self) -> list[Claim]:
        return [*super().evidence(), *self._layer_claims()]


def _mark(parts: list[nn.Parameter]) -> None:
    """Have DeepSpeed count the gradients of ``parts`` on every rank of a layer: of those without a mark it counts the
    first rank's."""
    for parameter in parts:
        parameter.tensor_model_parallel = True  # type: ignore[attr-defined]


class _Groups:
    """The questions that DeepSpeed 0.19.8 has for Megatron-LM's ``mpu``."""

    def __init__(self, resolved: Resolved, layers: dist.ProcessGroup, states: dist.ProcessGroup) -> None:
        mesh, rank = resolved.mesh, dist.get_rank()
        self._layers, self._states = layers, states
        self._column, self._columns = mesh.column(rank), mesh.tensor
        self._peers = mesh.state_peers(rank)

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._layers

    def get_model_parallel_rank(self) -> int:
        return self._column

    def get_model_parallel_world_size(self) -> int:
        return self._columns

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._states

    def get_data_parallel_group_ranks(self) -> list[int]:
        return self._peers

    def get_data_parallel_rank(self) -> int:
        return self._peers.index(dist.get_rank())

    def get_data_parallel_world_size(self) -> int:
        return len(self._peers)
