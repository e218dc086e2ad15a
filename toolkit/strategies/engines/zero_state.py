"""Whole tensors of a DeepSpeed ZeRO engine: master weights, gradients and moments, read and written by parameter.

DeepSpeed's own accessors do the reading (``deepspeed.utils.safe_get_full_*``) and, where they can, the writing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from toolkit.optim.adamw import step_count
from toolkit.strategies.engines.base import on_host


class ZeroTensors:
    """Access by parameter to what ZeRO keeps in flat partitions. Every rank calls every method; what is read is on the
    CPU, or on the meta device where this rank has no use for the values (``reads`` False)."""

    def __init__(self, engine: Any) -> None:
        self.stage = int(engine.zero_optimization_stage())
        self.device: torch.device = engine.device
        self.zero: Any = engine.optimizer
        self.inner: torch.optim.Optimizer = engine.optimizer.optimizer

    def weight(self, parameter: nn.Parameter, reads: bool = True) -> torch.Tensor:
        from deepspeed.utils import safe_get_full_fp32_param

        # Below stage 3 DeepSpeed puts whole tensors together in float32, whatever dtype it keeps them in.
        return on_host(safe_get_full_fp32_param(parameter), reads).to(self.masters()[0].dtype)

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The accumulated gradient as the optimizer will read it, loss scale still in it."""
        from deepspeed.utils import safe_get_full_grad

        grad = safe_get_full_grad(parameter)
        kept = getattr(self.zero, "gradient_accumulation_dtype", None)
        return None if grad is None else on_host(grad).to(kept or grad.dtype)

    def moment(self, parameter: nn.Parameter, key: str, reads: bool = True) -> torch.Tensor | None:
        from deepspeed.utils import safe_get_full_optimizer_state

        if not self._has_state(key):
            return None
        self._link_state()
        dtype = next(state[key].dtype for state in self.inner.state.values() if key in state)
        return on_host(safe_get_full_optimizer_state(parameter, key), reads).to(dtype)

    def set_weight(self, parameter: nn.Parameter, weight: torch.Tensor) -> None:
        """Set the master weight and the copy that the next forward uses."""
        import deepspeed

        self._write(parameter, weight, None)
        if self.stage < 3:
            parameter.data.copy_(weight)
            return
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if dist.get_rank() == 0:
                parameter.data.copy_(weight)

    def set_moment(self, parameter: nn.Parameter, key: str, value: torch.Tensor) -> None:
        self._write(parameter, value, key)

    def _write(self, parameter: nn.Parameter, value: torch.Tensor, key: str | None) -> None:
        from deepspeed import utils

        if self.stage < 3:
            if key is None:
                utils.safe_set_full_fp32_param(parameter, value.to(self.device))
            else:
                utils.safe_set_full_optimizer_state(parameter, value.to(self.device), key)
            return
        # DeepSpeed 0.19.8 cannot write a whole tensor whose size the ranks do not divide; its local setter can.
        size = parameter.partition_numel()  # type: ignore[attr-defined]  # DeepSpeed adds this
        padded = torch.zeros(size * dist.get_world_size(), dtype=torch.float32)
        padded[: value.numel()] = value.reshape(-1)
        mine = padded[size * dist.get_rank() :][:size].to(self.device)
        if key is None:
            utils.safe_set_local_fp32_param(parameter, mine)
        else:
            utils.safe_set_local_optimizer_state(parameter, mine, key)

    def masters(self) -> list[torch.Tensor]:
        """The flat partitions of master weights that this rank updates."""
        for attribute in (
            "fp32_partitioned_groups_flat",  # stage 3
            "single_partition_of_fp32_groups",  # stages 1 and 2
            "fp32_groups_flat_partition",  # stage 1 under bf16 (BF16_Optimizer)
        ):
            if hasattr(self.zero, attribute):
                return list(getattr(self.zero, attribute))
        raise AssertionError(f"unknown ZeRO optimizer {type(self.zero).__name__}")

    def make_state(self, keys: Sequence[str], counts: bool) -> None:
        """Give the inner optimizer zero state before its first step, so that there is state to write to. ``counts``: it
        has a count of steps."""
        for flat in self.masters():
            if flat not in self.inner.state:
                self.inner.state[flat] = {
                    **({"step": step_count(self.inner, flat, 0)} if counts else {}),
                    **{key: torch.zeros_like(flat) for key in keys},
                }
        self._link_state()

    def _link_state(self) -> None:
        """DeepSpeed 0.19.8, stages 1 and 2, links parameters to their moments after the first group's first step
        and never again, so that parameters of every other group have none («exp_avg not found in optimizer state
        fragment»): link all groups."""
        if self.stage < 3:
            self.zero._hp_optimizer_states_linked = False
            self.zero._lazy_init_hp_params_optimizer_state()

    def step_count(self) -> int:
        return max((int(state["step"]) for state in self.inner.state.values() if "step" in state), default=0)

    def set_step_count(self, step: int) -> None:
        for state in self.inner.state.values():
            if "step" in state:
                state["step"].fill_(float(step))

    def _has_state(self, key: str) -> bool:
        return any(isinstance(state.get(key), torch.Tensor) for state in self.inner.state.values())
