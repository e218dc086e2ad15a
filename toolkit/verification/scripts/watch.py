"""What reads the whole weights, gradients and moments of a recorded model, however it is split over ranks, and sees a
DeepSpeed engine step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from toolkit.recipe.mesh import Mesh
from toolkit.strategies.engines.base import MOMENTS, OptimizerState
from toolkit.upstream.torch_fsdp import precision_of
from toolkit.verification.scripts.together import read_each

Tensors = dict[str, torch.Tensor]
Keep = Callable[[str, Any], Any]
"""What is kept of a tensor, or of a parameter's state, by its name, once it is read: the next one needs memory."""
WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


class NotReadable(Exception):
    """Why a model cannot be recorded, in words."""


def read_kept(items: Iterable[tuple[str, Any]], read: Callable[[Any], Any], keep: Keep) -> dict[str, Any]:
    """What ``keep`` makes of each item's name and of what ``read`` gives of it; as ``read_each``."""
    return read_each(((name, (name, item)) for name, item in items), lambda pair: keep(pair[0], read(pair[1])))


class Watched:
    """A model that trains and its torch optimizer: one process, DDP, FSDP2, or layers in parts."""

    strategy = "single"
    copy_dtype: str | None = None
    """Of the 16-bit copy that computes, where there is one."""
    reduce: str | None = None
    """The dtype that gradients are reduced in, where the strategy says so."""
    loss_scale = 1.0

    def __init__(self, model: nn.Module, optimizer: Any, names: set[str]) -> None:
        """``names``: what the parameters were called before anything was wrapped."""
        self.optimizer = getattr(optimizer, "optimizer", optimizer)
        self.parameters = {clean_name(name, names): p for name, p in model.named_parameters() if p.requires_grad}
        policy = precision_of(model)
        if policy is not None:
            self.strategy = "fsdp2"
            self.copy_dtype, self.reduce = _short(policy.param_dtype), _short(policy.reduce_dtype)
        elif any(hasattr(p, "full_tensor") for p in model.parameters()):
            self.strategy = "tensor"  # layers in parts; every rank has the same rows

    @property
    def groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    def members(self) -> list[list[nn.Parameter]]:
        """The parameters of each group."""
        return [group["params"] for group in self.groups]

    def weights(self, keep: Keep) -> dict[str, Any]:
        return read_kept(self.parameters.items(), whole, keep)

    def gradients(self, keep: Keep) -> dict[str, Any]:
        """Before clipping, where it is asked for then; None for a parameter that has none."""
        return read_kept(self.parameters.items(), lambda p: None if p.grad is None else whole(p.grad), keep)

    def states(self, keep: Keep) -> dict[str, Any]:
        """An ``OptimizerState`` of each parameter, or None."""
        return read_kept(self.parameters.items(), self._state, keep)

    def _state(self, parameter: nn.Parameter) -> OptimizerState | None:
        state = self.optimizer.state.get(parameter)
        if not state or any(key not in state for key in ("step", *MOMENTS)):
            return None
        count = whole(state["step"]).item() if isinstance(state["step"], torch.Tensor) else state["step"]
        return OptimizerState(int(count), read_each(((key, state[key]) for key in MOMENTS), whole))


class WatchedFsdp1(Watched):
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

    def weights(self, keep: Keep) -> dict[str, Any]:
        return read_kept(_named(self.parameters), self.reader.full_weight, keep)

    def gradients(self, keep: Keep) -> dict[str, Any]:
        return read_kept(_named(self.parameters), self.reader.full_gradient, keep)

    def states(self, keep: Keep) -> dict[str, Any]:
        return read_kept(_named(self.parameters), self.reader.full_state, keep)


def _named(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    return ((name, name) for name in names)


class WatchedZero(Watched):
    """A DeepSpeed engine of ZeRO 1, 2 or 3: it averages, clips, scales and steps by itself."""

    def __init__(self, engine: Any, names: set[str]) -> None:
        from toolkit.strategies.engines.zero_state import ZeroTensors
        from toolkit.verification.scripts.zero_links import ZeroLinks

        stage = int(engine.zero_optimization_stage())
        if not stage:
            raise NotReadable("DeepSpeed is recorded at ZeRO stages 1, 2 and 3 only, not at stage 0")
        if not isinstance(getattr(engine.optimizer, "optimizer", None), torch.optim.Optimizer):
            raise NotReadable(f"DeepSpeed's {type(engine.optimizer).__name__} has no torch optimizer to read")
        super().__init__(engine.module, engine.optimizer.optimizer, names)
        self.engine, self.strategy = engine, f"zero{stage}"
        self.tensors, self.links = ZeroTensors(engine), ZeroLinks(engine)
        dtype = engine.get_data_types()[0]
        self.copy_dtype = None if dtype == torch.float32 else _short(dtype)
        summed = getattr(engine.optimizer, "gradient_accumulation_dtype", None)
        sent = getattr(engine, "communication_data_type", None)
        self.reduce = _short(sent) or _short(summed)

    @property
    def loss_scale(self) -> float:  # type: ignore[override]  # it moves
        scaler = getattr(self.engine.optimizer, "loss_scaler", None)
        return float(scaler.cur_scale) if scaler is not None and self.copy_dtype == "float16" else 1.0

    @property
    def limit(self) -> float:
        """The norm that the engine clips to."""
        return float(self.engine.gradient_clipping() or 0.0)

    def members(self) -> list[list[nn.Parameter]]:
        zero = self.engine.optimizer
        members: list[list[nn.Parameter]] = getattr(zero, "bit16_groups", None) or zero.fp16_groups
        return members

    def weights(self, keep: Keep) -> dict[str, Any]:
        with self.links.corrected():
            return read_kept(self.parameters.items(), self.tensors.weight, keep)

    def gradients(self, keep: Keep) -> dict[str, Any]:
        scale = self.loss_scale

        def read(parameter: nn.Parameter) -> torch.Tensor | None:
            gradient = self.tensors.gradient(parameter)
            return None if gradient is None else gradient.float() / scale

        with self.links.corrected():
            return read_kept(self.parameters.items(), read, keep)

    def states(self, keep: Keep) -> dict[str, Any]:
        state: dict[str, Any] = next(iter(self.optimizer.state.values()), {})
        if state and any(key not in state for key in MOMENTS):
            return {name: keep(name, None) for name in self.parameters}
        with self.links.corrected():
            return super().states(keep)

    def _state(self, parameter: nn.Parameter) -> OptimizerState | None:
        moments = {key: self.tensors.moment(parameter, key) for key in MOMENTS}
        found = {key: moment for key, moment in moments.items() if moment is not None}
        return OptimizerState(self.tensors.step_count(), found) if len(found) == len(MOMENTS) else None

    def watch(self, before: Callable[[], None], after: Callable[[float, bool], None]) -> Callable[[], Any]:
        """Call ``before`` and ``after`` around each optimizer step; ``after`` is given the gradient's norm, and whether
        the step was skipped. Returns what undoes that."""
        engine, step = self.engine, self.engine.step

        @functools.wraps(step)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if not engine.is_gradient_accumulation_boundary():
                return step(*args, **kwargs)
            before()
            answer = step(*args, **kwargs)
            after(float(engine.get_global_grad_norm()), bool(getattr(engine.optimizer, "overflow", False)))
            return answer

        engine.step = watched
        return lambda: engine.__dict__.pop("step", None)


def whole(tensor: Any) -> torch.Tensor:
    """All of a tensor, on the CPU; every rank calls it."""
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().cpu().clone()


def unwrapped(model: Any) -> Any:
    """The model itself, out of DDP's and DeepSpeed's."""
    while isinstance(getattr(model, "module", None), nn.Module):
        model = model.module
    return model


def clean_name(name: str, known: set[str]) -> str:
    """A wrapped parameter's own name. ``known``: the names before wrapping, where they are known."""
    if name in known:
        return name
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    while len(parts) > 1 and parts[0] == "module" and ".".join(parts) not in known:
        parts = parts[1:]
    return ".".join(parts)


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
