"""What a recorder reads from somebody's own loop: whole weights, gradients and moments, of torch's or DeepSpeed's
optimizers, and when a step begins and ends."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from toolkit.strategies.engines.base import MOMENTS, OptimizerState
from toolkit.verification.scripts.together import read_each

Tensors = dict[str, torch.Tensor]
Keep = Callable[[str, Any], Any]
"""What is kept of a tensor, or of a parameter's state, by its name, once it is read: the next one needs memory."""
WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def as_read(name: str, value: Any) -> Any:
    return value


def read_kept(items: Iterable[tuple[str, Any]], read: Callable[[Any], Any], keep: Keep) -> dict[str, Any]:
    """What ``keep`` makes of each item's name and of what ``read`` gives of it; as ``read_each``."""
    return read_each(((name, (name, item)) for name, item in items), lambda pair: keep(pair[0], read(pair[1])))


class Watched:
    """A model that trains and its torch optimizer: one process, DDP or FSDP2."""

    copy_dtype: str | None = None
    """Of the 16-bit copy that computes, where there is one."""
    loss_scale = 1.0

    def __init__(self, model: nn.Module, optimizer: Any, names: set[str]) -> None:
        """``names``: what the parameters were called before anything was wrapped."""
        self.inner: Any = unwrapped(model)
        self.optimizer = getattr(optimizer, "optimizer", optimizer)
        self.parameters = {clean_name(name, names): p for name, p in model.named_parameters() if p.requires_grad}

    @property
    def groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    def weights(self, keep: Keep = as_read) -> dict[str, Any]:
        return read_kept(self.parameters.items(), whole, keep)

    def gradients(self, keep: Keep = as_read) -> dict[str, Any]:
        """Before clipping, where it is asked for then; None for a parameter that has none."""
        return read_kept(self.parameters.items(), lambda p: None if p.grad is None else whole(p.grad), keep)

    def states(self, keep: Keep = as_read) -> dict[str, Any]:
        """An ``OptimizerState`` of each parameter, or None."""
        return read_kept(self.parameters.items(), self._state, keep)

    def _state(self, parameter: nn.Parameter) -> OptimizerState | None:
        state = self.optimizer.state.get(parameter)
        if not state:
            return None
        return OptimizerState(int(whole(state["step"]).item()), {key: whole(state[key]) for key in MOMENTS})

    def decays(self) -> dict[str, float]:
        by_parameter = {id(p): group["weight_decay"] for group in self.groups for p in group["params"]}
        return {name: by_parameter.get(id(p), 0.0) for name, p in self.parameters.items()}

    def watch(self, before: Callable[[], None], after: Callable[[float | None, bool], None]) -> list[Any]:
        """Call ``before`` and ``after`` around each optimizer step; ``after`` is given the gradient's norm where the
        optimizer tells it, and whether it skipped. Returns handles to remove."""
        return [
            self.optimizer.register_step_pre_hook(lambda *_: before()),
            self.optimizer.register_step_post_hook(lambda *_: after(None, False)),
        ]

    def limit(self) -> float | None:
        """The norm that the optimizer itself clips to; None where the loop does that."""
        return None


class WatchedZero(Watched):
    """A DeepSpeed engine of ZeRO 1, 2 or 3: it averages, clips, scales and steps by itself."""

    def __init__(self, engine: Any, names: set[str]) -> None:
        from toolkit.strategies.engines.zero_state import ZeroTensors
        from toolkit.verification.loops.zero_links import ZeroLinks

        self.engine = engine
        self.tensors = ZeroTensors(engine)
        self.links = ZeroLinks(engine)
        super().__init__(engine.module, engine.optimizer.optimizer, names)
        dtype = engine.get_data_types()[0]
        self.copy_dtype = None if dtype == torch.float32 else str(dtype).removeprefix("torch.")

    @property
    def loss_scale(self) -> float:  # type: ignore[override]  # it moves
        scaler = getattr(self.engine.optimizer, "loss_scaler", None)
        return float(scaler.cur_scale) if scaler is not None and self.copy_dtype == "float16" else 1.0

    def weights(self, keep: Keep = as_read) -> dict[str, Any]:
        with self.links.corrected():
            return read_kept(self.parameters.items(), self.tensors.weight, keep)

    def gradients(self, keep: Keep = as_read) -> dict[str, Any]:
        scale = self.loss_scale

        def read(parameter: nn.Parameter) -> torch.Tensor | None:
            gradient = self.tensors.gradient(parameter)
            return None if gradient is None else gradient.float() / scale

        with self.links.corrected():
            return read_kept(self.parameters.items(), read, keep)

    def states(self, keep: Keep = as_read) -> dict[str, Any]:
        with self.links.corrected():
            return read_kept(self.parameters.items(), self._state, keep)

    def _state(self, parameter: nn.Parameter) -> OptimizerState | None:
        moments = {key: self.tensors.moment(parameter, key) for key in MOMENTS}
        found = {key: moment for key, moment in moments.items() if moment is not None}
        return OptimizerState(self.tensors.step_count(), found) if len(found) == len(MOMENTS) else None

    def decays(self) -> dict[str, float]:
        zero = self.engine.optimizer
        members = getattr(zero, "bit16_groups", None) or zero.fp16_groups
        by_parameter = {
            id(p): group["weight_decay"] for group, params in zip(self.groups, members, strict=True) for p in params
        }
        return {name: by_parameter.get(id(p), 0.0) for name, p in self.parameters.items()}

    def watch(self, before: Callable[[], None], after: Callable[[float | None, bool], None]) -> list[Any]:
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
        return [_Undo(lambda: engine.__dict__.pop("step"))]

    def limit(self) -> float | None:
        return float(self.engine.gradient_clipping())


class _Undo:
    """Something to call where torch has a handle to remove."""

    def __init__(self, undo: Callable[[], Any]) -> None:
        self.remove = undo


def watched_loop(model: Any, optimizer: Any, names: set[str]) -> Watched:
    """What reads this model's tensors."""
    engine = model if hasattr(model, "zero_optimization_stage") else getattr(optimizer, "engine", None)
    return WatchedZero(engine, names) if engine is not None else Watched(model, optimizer, names)


def when_deepspeed_begins(model: nn.Module, then: Callable[[Any], None]) -> None:
    """Call ``then(engine)`` before the first forward of the DeepSpeed engine around ``model``: a Trainer's callbacks
    are given the bare model."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    forward = DeepSpeedEngine.forward

    def first(engine: Any, *args: Any, **kwargs: Any) -> Any:
        if engine.module is model:
            DeepSpeedEngine.forward = forward
            then(engine)
        return forward(engine, *args, **kwargs)

    DeepSpeedEngine.forward = first


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
