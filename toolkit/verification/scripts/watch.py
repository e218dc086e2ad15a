"""What reads the whole weights, gradients and moments of a recorded model, however it is split over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from toolkit.recipe.mesh import Mesh
from toolkit.strategies.engines.base import MOMENTS, OptimizerState
from toolkit.upstream.torch_fsdp import precision_of
from toolkit.verification.loops.watched import Keep, Watched, WatchedZero, as_read, clean_name, read_kept, whole
from toolkit.verification.scripts.together import read_each

Tensors = dict[str, torch.Tensor]


class NotReadable(Exception):
    """Why a model cannot be recorded, in words."""


class WatchedScript(Watched):
    """One process, DDP, FSDP2 or layers in parts, and any torch optimizer."""

    strategy = "single"
    reduce: str | None = None

    def __init__(self, model: nn.Module, optimizer: Any, names: set[str]) -> None:
        super().__init__(model, optimizer, names)
        policy = precision_of(model)
        if policy is not None:
            self.strategy = "fsdp2"
            self.copy_dtype, self.reduce = _short(policy.param_dtype), _short(policy.reduce_dtype)
        elif any(hasattr(p, "full_tensor") for p in model.parameters()):
            self.strategy = "tensor"  # layers in parts; every rank has the same rows

    def _state(self, parameter: nn.Parameter) -> OptimizerState | None:
        state = self.optimizer.state.get(parameter)
        if not state or any(key not in state for key in ("step", *MOMENTS)):
            return None
        count = whole(state["step"]).item() if isinstance(state["step"], torch.Tensor) else state["step"]
        return OptimizerState(int(count), read_each(((key, state[key]) for key in MOMENTS), whole))


class WatchedFsdp1(WatchedScript):
    """FSDP1 with the original parameters; their slices are put together in the order of the ranks."""

    strategy = "fsdp1"

    def __init__(self, model: nn.Module, optimizer: Any, names: set[str], shapes: dict[str, torch.Size]) -> None:
        from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel

        from toolkit.strategies.engines.fsdp1 import Fsdp1Engine

        super().__init__(model, optimizer, names)
        units = [one for one in model.modules() if isinstance(one, FullyShardedDataParallel)]
        if any(isinstance(parameter, FlatParameter) for parameter in model.parameters()):
            raise NotReadable("FSDP1 is recorded with use_orig_params=True only")
        mixed = next((unit.mixed_precision for unit in units), None)
        if mixed is not None:
            self.copy_dtype, self.reduce = _short(mixed.param_dtype), _short(mixed.reduce_dtype)
        reader: Any = object.__new__(Fsdp1Engine)
        reader.parameters, reader.optimizer, reader.shapes = self.parameters, self.optimizer, shapes
        reader.device = next(iter(self.parameters.values())).device
        # Hybrids divide a parameter within a group of ranks.
        group = units[0].process_group if units else dist.group.WORLD
        ranks = dist.get_world_size(group)
        reader.resolved = SimpleNamespace(mesh=Mesh(dist.get_world_size() // ranks, ranks))
        reader.place, reader._group = dist.get_rank(group), group
        reader.moment_keys = lambda name: MOMENTS
        self.reader = reader

    def weights(self, keep: Keep = as_read) -> dict[str, Any]:
        return read_kept(_named(self.parameters), self.reader.full_weight, keep)

    def gradients(self, keep: Keep = as_read) -> dict[str, Any]:
        return read_kept(_named(self.parameters), self.reader.full_gradient, keep)

    def states(self, keep: Keep = as_read) -> dict[str, Any]:
        return read_kept(_named(self.parameters), self.reader.full_state, keep)


def _named(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    return ((name, name) for name in names)


class WatchedZeroScript(WatchedZero):
    """A DeepSpeed engine of ZeRO 1, 2 or 3."""

    reduce: str | None = None

    def __init__(self, engine: Any, names: set[str]) -> None:
        stage = int(engine.zero_optimization_stage())
        if not stage:
            raise NotReadable("DeepSpeed is recorded at ZeRO stages 1, 2 and 3 only, not at stage 0")
        if not isinstance(getattr(engine.optimizer, "optimizer", None), torch.optim.Optimizer):
            raise NotReadable(f"DeepSpeed's {type(engine.optimizer).__name__} has no torch optimizer to read")
        super().__init__(engine, names)
        self.strategy = f"zero{stage}"
        summed = getattr(engine.optimizer, "gradient_accumulation_dtype", None)
        sent = getattr(engine, "communication_data_type", None)
        self.reduce = _short(sent) or _short(summed)

    def states(self, keep: Keep = as_read) -> dict[str, Any]:
        state: dict[str, Any] = next(iter(self.optimizer.state.values()), {})
        if state and any(key not in state for key in MOMENTS):
            return {name: keep(name, None) for name in self.parameters}
        return super().states(keep)


def whole_value(parameter: Any) -> torch.Tensor:
    """A frozen parameter or a buffer, whole, on the CPU; every rank calls it."""
    if hasattr(parameter, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().cpu().clone()
    return whole(parameter)


def is_split(model: nn.Module) -> bool:
    """Whether ranks hold parts of its parameters, so that all of them have to read together."""
    split = any(hasattr(p, "full_tensor") or hasattr(p, "ds_id") for p in model.parameters())
    return split or any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())


def plain_names(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by the names that they had before anything was wrapped."""
    return {clean_name(name, set()): parameter for name, parameter in model.named_parameters()}


def _short(dtype: Any) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")
