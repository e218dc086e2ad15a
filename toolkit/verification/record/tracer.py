"""Watches a run from inside its rank: what goes into each forward, what each step leaves. Changes nothing.

It wraps the calls that the training loop makes itself, so what is recorded is what the loop did.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from toolkit.data.collate import MicroBatch
from toolkit.optim.adamw8bit import stored_dtype
from toolkit.optimizers import optimizer_kind
from toolkit.recipe.mesh import RowPart
from toolkit.rooms import asked_options
from toolkit.strategies.engines.base import Engine, Step
from toolkit.training import loop
from toolkit.training.loop import Progress
from toolkit.training.session import Session
from toolkit.upstream.torch import DispatchMode, sees_operators
from toolkit.verification.cases.case import CALM_SCALE, counted_step
from toolkit.verification.record.axes import axis_of
from toolkit.verification.record.block_inputs import BlockInputs, watched_inputs
from toolkit.verification.record.trace import Evaluated, MicroTrace, Product, RunTrace, StepTrace, digest, plain

OVERFLOWING_SCALE = 2.0**60
"""No 16-bit gradient survives it: float16 ends at 65504."""


_FORWARD = "forward of micro-batch {}"
FIRST = _FORWARD.format(0)
"""The stage of a run that has no loss yet."""


class SessionTracer:
    """Attached to one session for one call of the training loop; fills ``trace``."""

    def __init__(
        self,
        session: Session,
        progress: Progress,
        overflow_step: int | None = None,
        marker: Path | None = None,
        loss_scale: float = CALM_SCALE,
    ) -> None:
        self.session, self.progress = session, progress
        self.engine: Engine = session.engine
        self.main = session.accelerator.process_index == 0
        self.overflow_step, self.marker, self.loss_scale = overflow_step, marker, loss_scale
        self.trace = RunTrace()
        self.collectives: Counter[str] = Counter()
        self.axes: Counter[str] = Counter()
        """With a mesh: collectives by kind and axis, «all-reduce replicate»."""
        self.reducing: set[int] = set()
        """Micro-batches of the first step in whose backward gradients are summed over ranks."""
        self._in_backward = False
        self.options = [option for option, _ in asked_options(session.resolved.recipe)]
        self.operators: Counter[str] = Counter()
        """Of each option with operators, how many torch ran in the step where they are counted."""
        self.products: list[Product] = []
        self.actions: list[tuple[str, int]] = []
        """With a pipeline: what this rank did with the micro-batches of the first step, in order."""
        self.exchanged: dict[str, int] = {}
        """And how many tensors it exchanged with its neighbours in it."""
        self.inputs: BlockInputs = {}
        """What the blocks were given in the first micro-batch."""
        self.dtypes: dict[str, set[str]] = {"gradient": set(), "state": set(), "weight": set()}
        # Held from the start: FSDP1 in one process (torch 2.13.0, NO_SHARD) leaves plain tensors in the place of
        # frozen parameters after a step, and names them no more. What they hold is the same.
        self._frozen_parameters = {
            name: p for name, p in session.engine.model.named_parameters() if not p.requires_grad
        }
        self._packed = optimizer_kind(session.resolved.recipe.optimizer.name).packed
        self._step: StepTrace | None = None
        self._evaluation: Evaluated | None = None
        self._forced_from: float | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[RunTrace]:
        """Record everything that the training loop does inside."""
        engine: Any = self.engine
        if self.overflow_step is not None and engine.loss_scale > self.loss_scale:
            _set_scale(engine, self.loss_scale)
        self.trace.weights, self.trace.states, self.trace.copies = self._tensors()
        self.trace.averages = self._shadows()
        self.trace.statistics = self.engine.statistics()
        self.trace.frozen = self._frozen()
        shadows: list[Any] = list(self.session.shadows.values())
        for shadow in shadows:
            shadow.update = self._watched_update(shadow.update)
        loss_sum, backward, unscale, step = loop.loss_sum, engine.backward, engine.unscale, engine.step
        loop.loss_sum = self._watched_loss(loss_sum)
        engine.backward = self._watched_backward(backward)
        engine.unscale = self._watched_unscale(unscale)
        engine.step = lambda lr: self._watched_step(step, lr)
        try:
            with self._watching_products():
                yield self.trace
        finally:
            loop.loss_sum = loss_sum
            del engine.backward, engine.unscale, engine.step
            for shadow in shadows:
                del shadow.update
        self.trace.frozen_after = self._frozen()

    @contextlib.contextmanager
    def _watching_products(self) -> Iterator[None]:
        """Of the first micro-batch of each step. Compiled code is left alone."""
        if self.engine.resolved.recipe.compile:
            yield
            return

        def here() -> tuple[int, int] | None:
            step = self._step
            return None if step is None or step.micros else (step.step, 0)

        with contextlib.ExitStack() as stack:
            watches = (option.watching(self.engine.model, here) for option in self.options)
            seen = [stack.enter_context(watch) for watch in watches if watch is not None]
            yield
        self.products = list(itertools.chain(*seen))

    @contextlib.contextmanager
    def _watching_inputs(self) -> Iterator[None]:
        """Of the first micro-batch. Compiled code is left alone."""
        if self.inputs or self.engine.resolved.recipe.compile:
            yield
            return
        with watched_inputs(self.engine.blocks) as self.inputs:
            yield

    def _watched_loss(self, loss_sum: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def watched(model: Any, config: Any, tensors: Any, task: Any, *more: Any, **named: Any) -> torch.Tensor:
            if self._evaluation is not None:
                if not self._evaluation.weights:
                    self._evaluation.weights = self._weights()
                return loss_sum(model, config, tensors, task, *more, **named)
            if self._step is None:
                self._begin()
            assert self._step is not None
            self._mark(_FORWARD.format(len(self._step.micros)))
            with self._counting(), self._watching_inputs():
                loss = loss_sum(model, config, tensors, task, *more)
            kept = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
            part = next((one for one in more if isinstance(one, RowPart)), None)
            own = None if part is None else (part.index, part.count)
            self._step.micros.append(MicroTrace(kept, float(loss.detach().item()), own))
            return loss

        return watched

    def _watched_backward(self, backward: Callable[..., None]) -> Callable[..., None]:
        def watched(loss: torch.Tensor, last: bool) -> None:
            self._mark("backward")
            self._in_backward = True
            with self._counting():
                backward(loss, last)
            self._in_backward = False

        return watched

    def evaluate(self, batches: Sequence[MicroBatch]) -> None:
        """Have the training loop's own evaluation run, and record what it is at; every rank calls it."""
        self._evaluation = found = Evaluated(self.progress.step, math.nan)
        found.loss = loop.evaluate(self.session, batches).loss
        if not self.main:
            found.weights = {}
        self.trace.evaluated, self._evaluation = found, None

    def _weights(self) -> dict[str, torch.Tensor]:
        return {name: self.engine.full_weight(name, main_only=True) for name in self.engine.shapes}

    def _begin(self) -> None:
        self._step = StepTrace(self.progress.step, updates_before=self.progress.updates)
        if self._step.step == self.overflow_step:
            self._forced_from = _set_scale(self.engine, OVERFLOWING_SCALE)
        self._step.loss_scale = self.engine.loss_scale

    def _watched_unscale(self, unscale: Callable[[], None]) -> Callable[[], None]:
        def watched() -> None:
            with self._counting():  # where stages have passed on all micro-batches, they sum gradients
                unscale()
            self._note_schedule()
            self._after_backward()

        return watched

    def _note_schedule(self) -> None:
        """Of the first step: what this rank has done with its micro-batches, and what it has exchanged."""
        pipeline = self.engine.pipeline
        if pipeline is not None and self._step is not None and self._step.step == 0:
            self.actions = list(pipeline.actions)
            self.exchanged = dict(pipeline.link.counts)

    def _after_backward(self) -> None:
        step = self._step
        assert step is not None
        self._mark("gradient")
        for name in self.engine.shapes:
            gradient = self.engine.full_gradient(name)
            if gradient is not None:
                if not step.gradient_digests:
                    self.dtypes["gradient"].add(_name(_gradient_dtype(self.engine, name, gradient)))
                step.gradient_digests[name] = digest(gradient)
            if self.main:
                step.gradient[name] = gradient

    def _watched_step(self, take_step: Callable[[float], Step], lr: float) -> Step:
        step = self._step
        assert step is not None
        self._mark("optimizer step")
        with self._counting():
            taken = take_step(lr)
        if self._forced_from is not None:
            _set_scale(self.engine, self._forced_from / 2)
            self._forced_from = None
        step.norm, step.skipped = plain(taken.grad_norm), bool(taken.skipped)
        step.lr = sorted({float(group["lr"]) for group in self.engine.optimizer.param_groups})
        groups = self.engine.optimizer.param_groups
        step.rates = {name: float(group["lr"]) for group in groups for name in group.get("names", ())}
        step.weights, step.states, step.copies = self._tensors()
        step.statistics = self.engine.statistics()
        self.trace.steps.append(step)
        self._step = None
        self._mark("end of the step")
        return taken

    def _tensors(self) -> tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, str]]:
        weights, states, copies = {}, {}, {}
        for name, shape in self.engine.shapes.items():
            # As a checkpoint reads them.
            weight = self.engine.full_weight(name, main_only=True)
            state = self.engine.full_state(name, main_only=True)
            self.dtypes["weight"].add(_name(weight.dtype))
            if state is not None and self._packed:
                whole = self.engine.full_state(name, scales=True, main_only=True)
                kept = self.engine.optimizer.state.get(self.engine.parameters[name]) or {}
                stored = {_name(stored_dtype(kept[key])) for key in state.moments if key in kept}
                self.dtypes["state"] |= stored
                state.scales = whole.moments if whole and stored <= {"uint8"} else None
            elif state is not None:
                self.dtypes["state"] |= {_name(moment.dtype) for moment in state.moments.values()}
            held = self.engine.parameters.get(name)  # None: another stage has it
            live = None if held is None else held.data
            if type(live) is torch.Tensor and live.shape == torch.Size(shape):
                copies[name] = digest(live)
                if self.main:
                    copies[f"{name} as the optimizer has it"] = digest(weight.to(live.dtype))
            if self.main:
                weights[name], states[name] = weight, state
        return weights, states, copies

    def _watched_update(self, update: Callable[[int], None]) -> Callable[[int], None]:
        def watched(updates: int) -> None:
            update(updates)
            self.trace.steps[-1].averages = self._shadows()

        return watched

    def _shadows(self) -> dict[str, torch.Tensor]:
        """What options keep of the weights, as a checkpoint reads it and names it; rank 0 has it."""
        whole: dict[str, torch.Tensor] = {}
        for option, shadow in self.session.shadows.items():
            with shadow.swapped():
                whole |= {f"{name}.{option}": tensor for name, tensor in self._weights().items()}
        return whole if self.main else {}

    def _frozen(self) -> dict[str, str]:
        return {name: digest(_local(p)) for name, p in self._frozen_parameters.items()}

    def _counting(self) -> contextlib.AbstractContextManager[Any]:
        """Collectives are counted in the first step, operators of options in theirs: a dispatch mode around every
        operator takes its time."""
        counted = {0, *(counted_step(self.engine.resolved) for option in self.options if option.operators)}
        if self._step is None or self._step.step not in counted:
            return contextlib.nullcontext()
        if self.engine.resolved.recipe.compile or not sees_operators():
            return _profiled(self._count)
        return _Dispatched(self._count)

    def _count(self, operator: str, arguments: Sequence[Any] = ()) -> None:
        assert self._step is not None
        if operator.startswith(("c10d::", "_c10d_functional::")) and self._step.step == 0:
            for kind, spelled in _KINDS.items():
                if any(part in operator.lower() for part in spelled):
                    self.collectives[kind] += 1
                    axis = ""
                    if arguments and self.engine.resolved.recipe.strategy.mesh is not None:
                        axis = axis_of(kind, arguments, self.engine.resolved.mesh)
                        self.axes[f"{kind} {axis}"] += 1
                    # Along the tensor axis it is hidden states that are summed.
                    if self._in_backward and kind in _SUMS and axis != "tensor":
                        self.reducing.add(len(self._step.micros) - 1)
        elif self._step.step == counted_step(self.engine.resolved):
            self.operators.update(one.name for one in self.options if operator.startswith(one.operators))

    def _mark(self, stage: str) -> None:
        if self.marker is not None:
            self.marker.write_text(f"{self.progress.step} {stage}", encoding="utf-8")


class _Dispatched(DispatchMode):
    """Passes on the name of every operator that is called, and its arguments."""

    def __init__(self, called: Callable[[str, Sequence[Any]], None]) -> None:
        super().__init__()
        self.called = called

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Under other modes torch does not compile the optimizer's kernel either."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called(func.name(), args)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _profiled(called: Callable[[str], None]) -> Iterator[None]:
    """The same from torch's profiler: under a dispatch mode torch compiles nothing, and what it has once run as it is
    it never compiles (torch 2.13.0)."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        yield
    for event in seen.events():
        called(event.name)


_SUMS = ("all-reduce", "reduce-scatter")
_KINDS = {
    "all-reduce": ("allreduce", "all_reduce"),
    "all-gather": ("allgather", "all_gather"),
    "reduce-scatter": ("reduce_scatter",),
    "broadcast": ("broadcast",),
    "all-to-all": ("alltoall", "all_to_all"),
}


def _local(parameter: torch.Tensor) -> torch.Tensor:
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    shard = getattr(parameter, "ds_tensor", None)  # ZeRO-3 keeps its shard beside an empty parameter
    return shard if shard is not None else local


def _gradient_dtype(engine: Any, name: str, gradient: torch.Tensor) -> torch.dtype:
    if hasattr(engine, "tensors"):  # DeepSpeed: what it keeps, before the engine unscales it
        raw = engine.tensors.gradient(engine.parameters[name])
        return gradient.dtype if raw is None else raw.dtype
    return gradient.dtype


def _set_scale(engine: Any, scale: float) -> float:
    """Set the loss scale; returns the one before."""
    before = engine.loss_scale
    if engine.scaler is not None:
        engine.scaler.load_state_dict(engine.scaler.state_dict() | {"scale": scale})
    else:
        engine.optimizer.loss_scaler.cur_scale = scale
    return before


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
