"""One model of a process, from its first sight to its last recorded step."""

from __future__ import annotations

import math
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from toolkit.verification.record.fingerprint import fingerprint
from toolkit.verification.record.plain_form import save_plain
from toolkit.verification.record.spill import Spill
from toolkit.verification.record.trace import RankTrace, RunTrace, StepTrace
from toolkit.verification.scripts.calls import Calls, follow
from toolkit.verification.scripts.facts import CallTrace, GroupFacts, Sketches, UnitTrace
from toolkit.verification.scripts.kept_model import KeptModel, keep_model
from toolkit.verification.scripts.recorded_facts import facts_of, groups_of, this_rank
from toolkit.verification.scripts.sketching import Sketching
from toolkit.verification.scripts.watch import (
    NotReadable,
    Watched,
    WatchedFsdp1,
    WatchedZero,
    is_split,
    plain_names,
    whole,
    whole_value,
)

_WORTH_SAYING = 100_000_000
"""Bytes on the disk from which on a recording is announced."""


class Recording:
    """Keeps a model as it is now, watches its calls, and then ``steps`` optimizer steps after the first ``after``."""

    def __init__(self, model: Any, steps: int, after: int, main: bool, meet: Callable[[], None], folder: Path) -> None:
        """``meet``: wait for the other ranks, before what is split over them is read. ``folder``: of the recording."""
        self.model, self.steps, self.after, self.main = model, steps, after, main
        self._meet = meet
        self.folder = folder
        self.spill = Spill(folder / spilled_by(this_rank()))
        tensors_split = any(hasattr(p, "full_tensor") for p in model.parameters())
        kept = None
        if main or tensors_split:
            try:
                kept = keep_model(model, meet if tensors_split else None, self.spill.keep if main else None)
            except BaseException:
                self.spill.forget()
                raise
        self.kept: KeptModel | None = kept if main else None
        self.shapes = {name: getattr(p, "ds_shape", p.shape) for name, p in model.named_parameters()}
        self.unread = [name for name, p in model.named_parameters() if p.shape != self.shapes[name]]
        names: dict[int, list[str]] = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(p), []).append(name)
        self.tied = {of[0]: of for of in names.values()}
        """By the name of a parameter, all that it has."""
        self.kind = type(model).__name__
        self.calls = Calls(model, self._keep)
        self.wrapper = ""
        self.by_labels = False
        self.engine: Any = None
        self.loaded = self.done = False
        self.failed: str | None = None
        self.steps_seen = 0
        self.watched: Any = None
        self._unwatch: Callable[[], Any] = lambda: None
        self.taken: list[list[CallTrace]] = []
        self.outside: set[str] = set()
        self.notes: list[str] = []
        self.step = StepTrace(0)
        """What is known so far of the step that is being taken."""
        self.begun = Sketches()
        self.sketches: list[Sketches] = []
        self._sketching: Sketching | None = None
        self.limit = 0.0
        self.whole_clip = True
        self.lrs: list[list[float]] = []

    # ------------------------------------------------------------------ what the session reports

    def moved_to(self, model: Any) -> None:
        """Training begins. ``model``: what trains; it may be a copy of the model that was kept."""
        if not any(one is self.model for one in model.modules()):
            self.calls.remove()
            self.model, self.calls = model, Calls(model, self._keep)
        self.calls.take()

    def holds(self, parameters: Sequence[Any]) -> bool:
        """Whether one of ``parameters`` trains in this model."""
        wanted = {id(p) for p in parameters}
        return any(id(p) in wanted for p in self.model.parameters() if p.requires_grad)

    def attach_engine(self, engine: Any, before: Callable[..., None], after: Callable[..., None]) -> None:
        """A DeepSpeed engine steps this model. ``before`` and ``after`` call what they are given, guarded."""
        self.engine = engine

        def stepped(norm: float, skipped: bool) -> None:
            after(self.after_step, norm, skipped)

        names = {name for name, p in self.model.named_parameters() if p.requires_grad}
        self.watched = WatchedZero(engine, names)
        self.limit = self.watched.limit
        self._unwatch = self.watched.watch(lambda: before(self.before_step, None, 0.0), stepped)

    def backward_from(self, roots: Sequence[torch.Tensor]) -> None:
        """A backward begins at ``roots``."""
        if not self.calls.nodes:
            return
        leaves = {id(leaf) for leaf in follow(roots, self.calls.nodes)}
        if leaves:
            self.outside |= {name for name, p in plain_names(self.model).items() if id(p) in leaves}

    def clipping(self, parameters: Sequence[Any], limit: float, scale: float, optimizer: Any) -> None:
        """Gradients are about to be clipped; ``scale``: the loss scale that is still in them, or 0. ``optimizer``: the
        one that will step, as far as is known."""
        if self.done or self.steps_seen < self.after:
            return
        self.limit = limit
        if self.watched is None and optimizer is not None:
            self._begin(optimizer)
        if self.watched is not None:
            taken = {id(p) for p in parameters if p.grad is not None}
            ours = {id(p) for p in self.watched.parameters.values() if p.grad is not None}
            self.whole_clip = self.whole_clip and taken == ours
        self._take_gradient(scale)

    def clipped(self, norm: Any) -> None:
        if not self.done and self.steps_seen >= self.after:
            if hasattr(norm, "full_tensor"):
                self._meet()
            self.step.norm = float(whole(norm).item()) if isinstance(norm, torch.Tensor) else float(norm)

    def before_step(self, optimizer: Any, scale: float) -> None:
        """``scale``: the loss scale of the backward, 0 without a scaler; the gradients have it no longer."""
        if self.done or self.steps_seen < self.after:
            return
        if self.watched is None:
            self._begin(optimizer)
        if not self.trace.trainable:
            self._note_start()
        if not self.step.gradient_digests:
            self._take_gradient(0.0)
        self.step.loss_scale = self.watched.loss_scale if self.engine is not None else scale or 1.0
        lrs = [float(group["lr"]) for group in self.watched.groups]
        self.step.lr = sorted(set(lrs))
        self.lrs.append(lrs)

    def after_step(self, norm: float | None, skipped: bool) -> None:
        """The optimizer has stepped, or its scaler has not let it."""
        if self.done:
            return
        self.steps_seen += 1
        calls = self.calls.take()
        if self.steps_seen <= self.after:
            self.step = StepTrace(0)
            return
        step, run = self.step, self.trace.run
        if skipped:
            step.gradient_digests = {}
        step.skipped = skipped
        if norm is not None:
            step.norm = norm
        sketching = self._of_step()
        if skipped:
            sketching.sketches = Sketches()
        step.copies = self._copies()
        last = len(run.steps) + 1 == self.steps  # nothing begins with its weights
        step.weights = self._read(sketching, _without_values if last else self._spill)
        run.steps.append(step)
        self.sketches.append(sketching.sketches)
        self.taken.append([_spilled(call, self.spill) for call in calls])
        self.step, self._sketching = StepTrace(len(run.steps), updates_before=len(run.steps)), None
        self.done = len(run.steps) == self.steps

    def save(self) -> threading.Thread:
        """Let go of the model, and write in the background; every rank calls it once it is done."""
        self.let_go()
        unit = UnitTrace(self.trace, facts_of(self), self.begun, self.sketches)
        kept, rank, world, folder = self.kept, self.trace.rank, unit.facts.world, self.folder

        def write() -> None:
            part = folder / f"rank{rank}.part"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                if kept is not None:
                    save_plain(kept, folder / "model.pt", self.spill)
                    (folder / "world").write_text(str(world), encoding="utf-8")
                save_plain(unit, part, self.spill)
                part.rename(folder / f"rank{rank}.pt")
            except (OSError, RuntimeError) as error:  # torch raises a RuntimeError where the disk is full
                self.failed = not_written(folder, error)
                part.unlink(missing_ok=True)  # room for what this process has to report

        thread = threading.Thread(target=write, name="toolkit-record")
        thread.start()
        return thread

    def let_go(self) -> None:
        """Remove every hook."""
        self._unwatch()
        self.calls.remove()

    def forget(self) -> None:
        """Give the memory of what was recorded back to the command."""
        self.kept, self.taken, self.step = None, [], StepTrace(0)
        self.begun, self.sketches, self._sketching = Sketches(), [], None
        self.calls.finished = []
        self.trace.run = RunTrace()
        self.spill.forget()

    # ------------------------------------------------------------------ reading

    def _begin(self, optimizer: Any) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel

        names = set(self.shapes)
        if any(isinstance(one, FullyShardedDataParallel) for one in self.model.modules()) or self.wrapper == "fsdp1":
            self.watched = WatchedFsdp1(self.model, optimizer, names, self.shapes)
        else:
            self.watched = Watched(self.model, optimizer, names)
            if self.wrapper and self.watched.strategy == "single":
                self.watched.strategy = self.wrapper

    @property
    def trace(self) -> RankTrace:
        if not hasattr(self, "_trace"):
            self._trace = RankTrace(this_rank())
        return self._trace

    def _note_start(self) -> None:
        """What the first recorded step begins with: its weights have not changed since its first forward."""
        watched, run = self.watched, self.trace.run
        if self.engine is None:
            stepped = {id(p) for group in watched.groups for p in group["params"]}
            idle = [name for name, p in watched.parameters.items() if id(p) not in stepped]
            if idle:
                self.notes.append(f"{idle[0]} and {len(idle) - 1} others require a gradient; no optimizer has them")
            for name in idle:
                del watched.parameters[name]
        if not watched.parameters:
            raise NotReadable("none of its parameters is in the optimizer")
        self.trace.trainable = list(watched.parameters)
        if self.main:
            self._announce()
        run.copies = self._copies()
        begun = Sketching(self.main, self._groups())
        run.weights = self._read(begun, self._as_kept)
        self.begun = begun.sketches
        if self._split:
            self._meet()
        self._complete_kept()

    def _announce(self) -> None:
        """Say what is recorded and what it takes: a large model takes minutes. Raises NotReadable without the room."""
        sizes = [math.prod(self.shapes[name]) * self.watched.parameters[name].element_size()
                 for name in self.watched.parameters]  # fmt: skip
        more = sum(sizes) * (self.steps - 1)
        free = shutil.disk_usage(self.folder if self.folder.exists() else self.folder.parents[1]).free
        if more > free:
            raise NotReadable(
                f"{self.steps} steps of {self.kind} take {_size(more)} more, and {_size(free)} are free at "
                f"{_disk(self.folder)}; a recording of one step takes none"
            )
        if more + self.spill.bytes > _WORTH_SAYING:
            steps = (
                f"step {self.after + 1}" if self.steps == 1 else f"steps {self.after + 1} to {self.after + self.steps}"
            )
            sys.stderr.write(
                f"toolkit: recording {steps} of {self.kind}, {len(sizes)} tensors: "
                f"{_size(more + self.spill.bytes)} at {_disk(self.folder).partition(';')[0]}\n"
            )

    def _take_gradient(self, scale: float) -> None:
        if self.watched is None:
            return
        if self._split:
            self._meet()
        sketching = self._of_step()
        self.watched.gradients(sketching.gradient(scale, alone=not dist.is_initialized()))
        self.step.gradient_digests = sketching.digests

    def _of_step(self) -> Sketching:
        """Of the step that is being taken."""
        if self._sketching is None:
            self._sketching = Sketching(self.main, self._groups())
        return self._sketching

    def _groups(self) -> dict[str, GroupFacts]:
        return {name: group for group in groups_of(self) for name in group.names}

    def _read(self, into: Sketching, spill: Callable[[str, torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Read weights and states; what ``spill`` makes of the weights. A rank that is not asked reads nothing."""
        if not self.main and not self._split:
            return {}
        if self._split:
            self._meet()
        weights = self.watched.weights(into.weight(spill))
        if self._split:
            self._meet()
        self.watched.states(into.state)
        return weights if self.main else {}

    def _keep(self, value: torch.Tensor) -> torch.Tensor:
        """Of a call: in a step that is recorded."""
        return value if self.done or self.steps_seen < self.after else self.spill.keep(value)

    def _spill(self, name: str, value: torch.Tensor) -> torch.Tensor:
        return self.spill.keep(value)

    def _as_kept(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """The model's own tensor, where the first step begins with what the model was first seen with."""
        kept = None if self.kept is None else self.kept.tensors.get(name)
        if kept is not None and kept.dtype == value.dtype and kept.shape == value.shape and torch.equal(kept, value):
            return kept
        return self.spill.keep(value)

    def _copies(self) -> dict[str, str]:
        """Where every rank has whole weights: what they are on this one."""
        if self.watched.strategy not in ("single", "ddp") or not dist.is_initialized():
            return {}
        return {name: fingerprint(p.detach()) for name, p in self.watched.parameters.items()}

    def _complete_kept(self) -> None:
        """Values that could not be read before: of a model whose parameters were split as it was made. Which ones does
        not depend on what this rank keeps: all of them read together."""
        weights = self.trace.run.weights
        live = plain_names(self.model)
        for name in self.unread:
            trained = name in self.watched.parameters
            value = weights.get(name) if trained else whole_value(live[name])
            if self.kept is not None and value is not None:
                value = value if trained else self.spill.keep(value)
                self.kept.tensors |= dict.fromkeys(self.tied[name], value)

    @property
    def _split(self) -> bool:
        """Whether all ranks read together, or none does."""
        wrapped = self.engine is not None or self.wrapper == "fsdp1"  # maybe in one unit, around the model
        return dist.is_initialized() and (wrapped or is_split(self.model))


def _without_values(name: str, value: torch.Tensor) -> torch.Tensor:
    return value.new_empty(0)


def spilled_by(rank: int) -> str:
    """The name of the file with a rank's tensors."""
    return f"rank{rank}.tensors"


def _spilled(call: CallTrace, spill: Spill) -> CallTrace:
    outputs = [
        replace(one, gradient=None if one.gradient is None else spill.keep(one.gradient)) for one in call.outputs
    ]
    return replace(call, tensors=[spill.keep(one) for one in call.tensors], outputs=outputs)


def not_written(folder: Path, error: Exception) -> str:
    """Why a recording is not kept, in words."""
    free = shutil.disk_usage(folder.parent if not folder.exists() else folder).free
    why = error.strerror if isinstance(error, OSError) else "torch could not write the file"
    return f"rank {this_rank()} could not write its recording: {why} ({_size(free)} are free at {_disk(folder)})"


def _disk(folder: Path) -> str:
    """Where a recording is written, in words."""
    temporary = tempfile.gettempdir()
    return f"{temporary}; TMPDIR chooses another disk" if folder.is_relative_to(temporary) else str(folder.parent)


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
