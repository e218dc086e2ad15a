"""Where a recorded command is watched: functions of torch, accelerate and DeepSpeed, replaced while recording lasts.

A replacement reports to the session and calls the original with the same arguments. When recording is over the
originals are put back; who has imported a replacement by name pays one comparison for each call of it.
"""

from __future__ import annotations

import atexit
import functools
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from toolkit.verification.scripts import memory
from toolkit.verification.scripts.session import Session

_session: Session | None = None
_over: list[Any] = []
"""Handles of hooks on optimizers that do nothing any more. A hook that is removed while torch calls it ends the script
with an error where there is another one, so they go when the next session begins."""

Before = Callable[[tuple[Any, ...], dict[str, Any]], None]
After = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]


def begin(folder: str) -> None:
    """Create this process's session; later calls do nothing."""
    global _session
    if _session is None:
        settings = json.loads((Path(folder) / "settings.json").read_text(encoding="utf-8"))
        _session = Session(Path(folder), **settings)
        atexit.register(_session.finish)


def follow(session: Session) -> None:
    """Report what torch does to a session of the script's own as well, until that is over."""
    global _session
    import torch.distributed.fsdp

    others, _session = _session, session
    try:
        after_torch(torch)
        after_fsdp(torch.distributed.fsdp)
    finally:
        _session = others


def whereabouts(trace: Any) -> dict[str, Any] | None:
    """Where the script is that found no memory; None if this process is not recorded. ``trace``: the error's."""
    return None if _session is None else memory.whereabouts(_session, trace)


def _current() -> Session:
    assert _session is not None
    return _session


def _around(owner: Any, name: str, before: Before | None = None, after: After | None = None) -> None:
    """Replace ``owner.name`` by itself with something before and after it."""
    original = getattr(owner, name)
    session = _current()

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        if not session.active:
            return original(*args, **kwargs)
        if before is not None:
            session.guarded(before, args, kwargs)
        answer = original(*args, **kwargs)
        if after is not None:
            session.guarded(after, answer, args, kwargs)
        return answer

    _replace(owner, name, replaced)


def _replace(owner: Any, name: str, replacement: Any) -> None:
    original = getattr(owner, name)
    setattr(owner, name, replacement)

    def undo() -> None:
        if getattr(owner, name) is replacement:  # else a later session has replaced it, and calls it
            setattr(owner, name, original)

    _current().undo.append(undo)


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], at: int, name: str) -> Any:
    return args[at] if len(args) > at else kwargs.get(name)


# ---------------------------------------------------------------------- torch


def after_torch(torch: ModuleType) -> None:
    """Optimizers, backward, clipping, loss scaling, loading of weights, and DDP."""
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    from toolkit.verification.scripts.calls import computing_gradients, in_backward

    session = _current()
    while _over:
        _over.pop().remove()

    def backward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        roots = _argument(args, kwargs, 0, "tensors")
        if not in_backward():
            session.backward(list(roots) if isinstance(roots, list | tuple) else [roots])

    def computing(name: str) -> None:
        original = getattr(torch.autograd, name)

        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            with computing_gradients():
                return original(*args, **kwargs)

        _replace(torch.autograd, name, replaced)

    def wrapping(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        session.saw_model(_argument(args, kwargs, 1, "module"), "ddp")

    computing("backward")
    computing("grad")
    _around(torch.autograd, "backward", backward)
    _around(torch.optim.Optimizer, "__init__", after=lambda _, args, __: session.saw_optimizer(args[0]))
    _around(DistributedDataParallel, "__init__", wrapping)
    _around(nn.Module, "load_state_dict", lambda args, _: session.loaded(args[0]))
    before = register_optimizer_step_pre_hook(lambda optimizer, *_: session.guarded(session.before_step, optimizer))
    after = register_optimizer_step_post_hook(lambda optimizer, *_: session.guarded(session.after_step, optimizer))
    session.undo.append(lambda: _over.extend([before, after]))
    _clipping(torch)
    _scaling(torch)


def _clipping(torch: ModuleType) -> None:
    session = _current()
    utils = torch.nn.utils
    clip, with_norm = utils.clip_grad_norm_, utils.clip_grads_with_norm_

    def listed(parameters: Any) -> list[Any]:
        return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)

    @functools.wraps(clip)
    def clipping(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
        if not session.active:
            return clip(parameters, max_norm, *args, **kwargs)
        parameters = listed(parameters)  # it may be a generator
        session.guarded(session.clipping, parameters, float(max_norm))
        norm = clip(parameters, max_norm, *args, **kwargs)
        session.guarded(session.clipped, parameters, norm)
        return norm

    @functools.wraps(with_norm)
    def clipping_with(parameters: Any, max_norm: float, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
        if not session.active:
            return with_norm(parameters, max_norm, total_norm, *args, **kwargs)
        parameters = listed(parameters)
        session.guarded(session.clipping, parameters, float(max_norm))
        session.guarded(session.clipped, parameters, total_norm)
        return with_norm(parameters, max_norm, total_norm, *args, **kwargs)

    _replace(utils, "clip_grad_norm_", clipping)
    _replace(utils, "clip_grads_with_norm_", clipping_with)


def _scaling(torch: ModuleType) -> None:
    """A scaler may not let its optimizer step, and knows the scale of the gradients."""
    session = _current()
    kind = torch.amp.GradScaler
    step = kind.step

    @functools.wraps(step)
    def stepping(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not session.active or not scaler.is_enabled():
            return step(scaler, optimizer, *args, **kwargs)
        session.guarded(session.scaler_steps, optimizer, float(scaler.get_scale()))
        answer = step(scaler, optimizer, *args, **kwargs)
        session.guarded(session.scaler_stepped, optimizer)
        return answer

    def scaled(answer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        session.scale = float(args[0].get_scale()) if args[0].is_enabled() else 0.0

    def unscaled(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        session.scale = 0.0

    _replace(kind, "step", stepping)
    _around(kind, "scale", after=scaled)
    _around(kind, "unscale_", unscaled)


def after_fsdp(fsdp: ModuleType) -> None:
    """``fully_shard`` splits a model in its place; FSDP1 wraps it."""
    session = _current()

    def sharding(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        module = _argument(args, kwargs, 0, "module")
        for one in module if isinstance(module, list | tuple) else [module]:
            session.saw_part(one)

    def wrapping(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        session.saw_part(_argument(args, kwargs, 1, "module"), "fsdp1")

    def trained(model: Any) -> list[Any]:
        return [p for p in model.parameters() if p.requires_grad]

    def clip(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        session.clipping(trained(args[0]), float(_argument(args, kwargs, 1, "max_norm")))

    _around(fsdp, "fully_shard", sharding)
    _around(fsdp.FullyShardedDataParallel, "__init__", wrapping)
    _around(fsdp.FullyShardedDataParallel, "clip_grad_norm_", clip,
            lambda norm, args, _: session.clipped(trained(args[0]), norm))  # fmt: skip


# ---------------------------------------------------------------------- accelerate, DeepSpeed


def after_accelerate(accelerate: ModuleType) -> None:
    """``Accelerator.prepare``, whatever it does to the models that it is given."""
    from torch import nn

    session = _current()

    def preparing(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for one in args[1:]:
            if isinstance(one, nn.Module):
                session.saw_model(one)

    _around(accelerate.Accelerator, "prepare", preparing)


def after_accelerate_state(state: ModuleType) -> None:
    """With ``--on-cpu``: the processes are connected before accelerate decides what to run."""
    if _current().on_cpu:
        from toolkit.verification.scripts.on_cpu import connect_first

        connect_first(state)


def after_deepspeed(deepspeed: ModuleType) -> None:
    """``deepspeed.initialize``."""
    session = _current()
    if session.on_cpu:
        from toolkit.verification.scripts.on_cpu import without_shm_op

        without_shm_op(deepspeed)

    def begins(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (model := _argument(args, kwargs, 1, "model")) is not None:
            session.saw_model(model)

    _around(deepspeed, "initialize", begins, lambda answer, *_: session.saw_engine(answer[0]))
