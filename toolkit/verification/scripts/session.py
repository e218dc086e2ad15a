"""The recording of one process: which models there are, whose optimizer steps, and when it is over."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from toolkit.no_memory import is_out_of_memory
from toolkit.verification.scripts import copies
from toolkit.verification.scripts.copies import Plain
from toolkit.verification.scripts.memory import largest
from toolkit.verification.scripts.recording import Recording, not_written
from toolkit.verification.scripts.together import OthersStopped, Together
from toolkit.verification.scripts.units import units_holding, units_of
from toolkit.verification.scripts.watch import NotReadable


class Session:
    """Gets events from ``catch``. An error in it ends the recording and is reported; the command continues."""

    def __init__(self, folder: Path, steps: int, after: int = 0, *, on_cpu: bool = False, copies: bool = False) -> None:
        """``folder``: of this recording. ``steps``, ``after``: as of ``Recording``. ``on_cpu``: connect processes
        without a GPU. ``copies``: copy models too, for what transformers cannot build again."""
        self.folder, self.steps, self.after = folder, steps, after
        self.on_cpu, self.copies = on_cpu, copies
        self.scale = 0.0
        """The loss scale that gradients have in them now; 0: none."""
        self.main = os.environ.get("RANK", "0") == "0"
        self.recordings: list[Recording] = []
        self.active = True
        self.undo: list[Callable[[], Any]] = []
        """What puts back the functions that report to this session."""
        self.error: str | None = None
        self.optimizers: list[weakref.ref[Any]] = []
        self.pid = os.getpid()
        self._saved: list[int] = []
        self._plain: dict[int, Plain] = {}
        self._scales: dict[int, float] = {}
        self._took: set[int] = set()
        self._threads: list[threading.Thread] = []
        self._together: Together | None = None

    def guarded(self, action: Callable[..., None], *args: Any) -> None:
        """Call ``action`` unless the recording is over or this is a process forked from it."""
        if not self.active or os.getpid() != self.pid:
            return
        failed: Exception | None = None
        try:
            action(*args)
        except Exception as error:
            failed = error.with_traceback(None)  # its frames have what was read, and so the disk and the memory
        if failed is not None:
            self._fail(failed)

    def _fail(self, error: Exception) -> None:
        """Say why, give back what incomplete recordings took, and end."""
        if is_out_of_memory(error):
            name, size = largest(self.recordings)
            self.error = f"no memory was left for recording, which reads one tensor after another: {name} is {size}"
        elif isinstance(error, OSError) and error.errno is not None:
            self.error = not_written(self.folder, error)
        elif isinstance(error, NotReadable | OthersStopped):
            self.error = str(error)
        else:
            self.error = f"{type(error).__name__}: {error}"
        for recording in self.recordings:
            if not recording.done:
                recording.forget()
        sys.stderr.write(f"toolkit record: recording stopped: {self.error}\n")
        self.end()

    # ------------------------------------------------------------------ events

    def saw_model(self, module: nn.Module, wrapper: str = "") -> None:
        """A module that is about to be prepared or wrapped."""
        for unit in units_of(module):
            recording = self._recording_of(unit)
            if recording is not None and wrapper:
                recording.wrapper = wrapper

    def saw_part(self, module: nn.Module, wrapper: str = "") -> None:
        """A model, or a part of one, that is about to be split."""
        whole = next((r for r in self.recordings if _has(r.model, module) or _has(module, r.model)), None)
        if whole is not None:
            whole.wrapper = wrapper or whole.wrapper
            return
        for unit in units_holding(list(module.parameters())):
            if (recording := self._recording_of(unit)) is not None:
                recording.wrapper = wrapper

    def saw_optimizer(self, optimizer: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.optimizers.append(weakref.ref(optimizer))
        known = {id(p) for r in self.recordings for p in r.model.parameters()}
        if any(id(p) not in known for p in parameters if p.requires_grad):
            for unit in units_holding(parameters):
                self._recording_of(unit)

    def saw_engine(self, engine: Any) -> None:
        """What ``deepspeed.initialize`` gave back."""
        for unit in units_of(engine.module):
            recording = self._recording_of(unit)
            if recording is not None and any(p.requires_grad for p in unit.parameters()):
                try:
                    recording.attach_engine(engine, self.guarded, self._engine_stepped)
                except NotReadable as error:  # others may be: TRL gives its reference an engine of stage 0
                    recording.failed, recording.done = str(error), True
                    recording.let_go()

    def _engine_stepped(self, action: Callable[..., None], *args: Any) -> None:
        self.guarded(action, *args)
        self.guarded(self.finish_done)

    def loaded(self, module: nn.Module) -> None:
        """Weights were loaded into ``module``."""
        for recording in self.recordings:
            if not recording.steps_seen and (module is recording.model or _has(module, recording.model)):
                recording.loaded = True

    def backward(self, roots: Sequence[Any]) -> None:
        for recording in self._open():
            recording.backward_from(roots)

    def clipping(self, parameters: Sequence[Any], limit: float) -> None:
        for recording in self._stepping(parameters):
            recording.clipping(parameters, limit, self.scale, self._optimizer_of(parameters))

    def _optimizer_of(self, parameters: Sequence[Any]) -> Any:
        wanted = {id(p) for p in parameters}
        known = [optimizer for one in self.optimizers if (optimizer := one()) is not None]
        return next((one for one in reversed(known) if any(id(p) in wanted for p in _of(one))), None)

    def clipped(self, parameters: Sequence[Any], norm: Any) -> None:
        for recording in self._stepping(parameters):
            recording.clipped(norm)

    def scaler_steps(self, optimizer: Any, scale: float) -> None:
        """A scaler is about to let an optimizer step, or not."""
        inner = getattr(optimizer, "optimizer", optimizer)
        self._scales[id(inner)] = scale
        self._took.discard(id(inner))

    def scaler_stepped(self, optimizer: Any) -> None:
        inner = getattr(optimizer, "optimizer", optimizer)
        if id(inner) not in self._took:
            self.before_step(inner)
            self.after_step(inner, skipped=True)
        self.scale = 0.0

    def before_step(self, optimizer: Any) -> None:
        self._took.add(id(optimizer))
        for recording in self._stepping(_of(optimizer)):
            recording.before_step(optimizer, self._scales.get(id(optimizer), 0.0))

    def after_step(self, optimizer: Any, skipped: bool = False) -> None:
        for recording in self._stepping(_of(optimizer)):
            recording.after_step(None, skipped)
        self.finish_done()

    def finish_done(self) -> None:
        """Write what is complete; when all that trains is, let go of everything."""
        for at, recording in enumerate(self.recordings):
            if recording.done and not recording.failed and at not in self._saved:
                self._saved.append(at)
                if at in self._plain:
                    copies.write_changes(recording.model, self.folder / "copies" / str(at), self._plain[at])
                self._threads.append(recording.save())
        if self._saved and not self._open():
            self.end()

    def end(self) -> None:
        self.let_go()
        Together.stop(self.folder / "together", int(os.environ.get("RANK", "0")))
        self.report()

    def let_go(self) -> None:
        """Put back whatever was replaced, and remove every hook."""
        self.active = False
        for recording in self.recordings:
            recording.let_go()
        while self.undo:
            self.undo.pop()()

    def finish(self) -> None:
        """The process ends: let the files be complete."""
        if os.getpid() == self.pid:
            for thread in self._threads:
                thread.join()
            self.report()

    def report(self) -> None:
        """Leave what this process saw for the command that records; files are written meanwhile."""
        if os.getpid() != self.pid:
            return
        found = {
            "rank": int(os.environ.get("RANK", "0")),
            "optimizers": len(self.optimizers),
            "error": self.error,
            "models": [
                {"class": r.kind, "trained": sum(p.requires_grad for p in r.model.parameters()),
                 "steps_seen": r.steps_seen, "recorded": at in self._saved, "calls": len(r.calls.finished),
                 "unseen": r.calls.unseen, "failed": r.failed}
                for at, r in enumerate(self.recordings)
            ],
        }  # fmt: skip
        writing = self.folder / f"process-{self.pid}.part"
        with contextlib.suppress(OSError):  # a full disk: the command that records sees that itself
            writing.write_text(json.dumps(found), encoding="utf-8")
            writing.rename(self.folder / f"process-{self.pid}.json")

    # ------------------------------------------------------------------ models

    def _recording_of(self, unit: nn.Module) -> Recording | None:
        if any(p.is_meta for p in unit.parameters()):
            return None  # transformers splits a model before it loads it: it is seen again with its optimizer
        for recording in self.recordings:
            if recording.model is unit:
                return recording
            if _has(recording.model, unit):
                return None  # a part of one that is recorded
        for at, recording in enumerate(self.recordings):
            if _has(unit, recording.model):  # an adapter was put around it
                recording.let_go()
                self.recordings[at] = self._new(unit, at)
                return self.recordings[at]
        self.recordings.append(self._new(unit, len(self.recordings)))
        return self.recordings[-1]

    def _new(self, unit: nn.Module, at: int) -> Recording:
        if self.main and self.copies:  # before the recording's own hooks are in it
            copies.write(unit, self.folder / "copies" / str(at))
            self._plain[at] = copies.plain_attributes(unit)
        return Recording(unit, self.steps, self.after, self.main, self.meet, self.folder / "models" / str(at))

    def meet(self) -> None:
        """Wait for the other ranks. Raises OthersStopped if one is on another machine, where this folder is not."""
        world = dist.get_world_size()
        if int(os.environ.get("LOCAL_WORLD_SIZE", world)) < world:
            raise OthersStopped("ranks of several machines are not recorded where they hold parts of a model")
        if self._together is None:
            self._together = Together(self.folder / "together", dist.get_rank(), world)
        self._together.meet()

    def _open(self) -> list[Recording]:
        """Those that train and are not complete."""
        return [r for r in self.recordings if not r.done and any(p.requires_grad for p in r.model.parameters())]

    def _stepping(self, parameters: Sequence[Any]) -> list[Recording]:
        return [r for r in self._open() if r.engine is None and r.holds(parameters)]


def _of(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _has(module: nn.Module, part: nn.Module) -> bool:
    return any(one is part for one in module.modules())
