"""Reading what DeepSpeed 0.19.8 keeps of each parameter where ``round_robin_gradients`` is on (ZeRO 1 and 2).

The flat partitions are then in another order than the model's parameters, and DeepSpeed links parameters to them as if
they were in the same: ``safe_get_full_*`` answers with parts of other parameters. Here parameters are linked in the
order of the partitions while something is read, and as before afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

_LINK = ("_hp_mapping", "_index_in_param_group")


class ZeroLinks:
    """The links of one engine's parameters."""

    def __init__(self, engine: Any) -> None:
        zero = engine.optimizer
        turned = getattr(zero, "round_robin_gradients", False) and hasattr(zero, "round_robin_bit16_groups")
        self.parameters = [p for group in zero.bit16_groups for p in group] if turned else []
        if not self.parameters:
            return
        before = self._links()
        for at, group in enumerate(zero.round_robin_bit16_groups):
            _link(zero, at, group)
        self.right = self._links()
        self._set(before)

    @contextlib.contextmanager
    def corrected(self) -> Iterator[None]:
        """Inside, each parameter is linked to its own values."""
        if not self.parameters:
            yield
            return
        before = self._links()
        self._set(self.right)
        try:
            yield
        finally:
            self._set(before)

    def _links(self) -> list[tuple[Any, ...]]:
        return [tuple(getattr(p, name, None) for name in _LINK) for p in self.parameters]

    def _set(self, links: list[tuple[Any, ...]]) -> None:
        for parameter, values in zip(self.parameters, links, strict=True):
            for name, value in zip(_LINK, values, strict=True):
                setattr(parameter, name, value)


def _link(zero: Any, at: int, group: list[Any]) -> None:
    from deepspeed.utils import link_hp_params

    ranks = zero.real_dp_process_group[at]
    size = zero.bit16_groups_flat[at].numel() // dist.get_world_size(group=ranks)
    padded = any(zero.round_robin_bit16_padding[at])
    link_hp_params(
        lp_param_list=group,
        flat_hp_partition=zero.single_partition_of_fp32_groups[at],
        gradient_dict=zero.averaged_gradients,
        offload_gradient_dict=getattr(zero, "offload_gradient_dict", None),
        use_offload=zero.cpu_offload,
        param_group_index=at,
        partition_start=dist.get_rank(group=ranks) * size,
        partition_size=size,
        dp_group=ranks,
        param_offsets=zero.round_robin_bit16_offsets[at] if padded else None,
    )
