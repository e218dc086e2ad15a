"""Records somebody's own loop, so that `toolkit verify --trace DIR` can replay it through the plain loop.

In an Accelerate loop:

    recorder = Recorder("trace", model)                    # before prepare: keeps the model as it is
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    recorder.attach(model, optimizer)                      # after it

In a transformers Trainer (TRL's SFTTrainer too):

    recorder = Recorder("trace", model)                    # with its adapter, if it has one
    trainer = Trainer(model=model, ..., callbacks=[recorder.callback()])

It works for one process, DDP, FSDP and DeepSpeed's ZeRO 1 to 3. What it records, and how, is that of `toolkit record`.
"""

from __future__ import annotations

import json
import sys
import weakref
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from toolkit.errors import RunFailed
from toolkit.results import Result
from toolkit.verification.scripts import catch
from toolkit.verification.scripts.command import FILE
from toolkit.verification.scripts.recorded_facts import ranks_here, this_rank
from toolkit.verification.scripts.recording import Recording, spilled_by
from toolkit.verification.scripts.session import Session
from toolkit.verification.scripts.units import owners_of
from toolkit.verification.scripts.watch import clean_name, unwrapped


class Recorder:
    """Hooks on a model and its optimizer for the first ``steps`` optimizer steps; then lets go by itself."""

    def __init__(self, folder: str | Path, model: nn.Module, steps: int = 3) -> None:
        self.folder = Path(folder)
        self.steps = steps
        self.names = {name for name, p in model.named_parameters() if p.requires_grad}
        # Now: FSDP2 splits the model in its place, TRL puts another forward into it.
        self._session = _OwnSession(self.folder.absolute(), unwrapped(model), steps)

    def attach(self, model: nn.Module, optimizer: Any) -> None:
        """Begin to record; call it with what ``accelerator.prepare`` gave back. Raises ValueError where a parameter
        trains that the recorder's model does not have."""
        trained = {clean_name(name, self.names): p for name, p in model.named_parameters() if p.requires_grad}
        if strange := sorted(trained.keys() - self.names):
            raise ValueError(
                f"{strange[0]} and {len(strange) - 1} others train and were not in the model that the recorder was "
                "given; give it the model with its adapter: model = get_peft_model(model, config), before Recorder(...)"
            )
        # A Trainer's callbacks are given the bare model: what is around it is found among all objects.
        self._session.begin(unwrapped(model), optimizer, [model, *owners_of(trained.values())])

    def callback(self) -> Any:
        """A transformers TrainerCallback that attaches when training begins."""
        from transformers import TrainerCallback

        recorder = self

        class Attach(TrainerCallback):
            def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
                recorder.attach(given["model"], given["optimizer"])

        return Attach()


class _OwnSession(Session):
    """The recording of one model by its own loop. What fails in it is raised there, and ranks that read together do not
    wait for each other: they may be on several machines."""

    def __init__(self, folder: Path, model: nn.Module, steps: int) -> None:
        super().__init__(folder, steps)
        rank = this_rank()
        self.main = rank == 0
        self.unit = folder / "0"
        self.unit.mkdir(parents=True, exist_ok=True)
        earlier = [self.unit / f"rank{rank}.pt", self.unit / spilled_by(rank)]
        for file in [*earlier, folder / FILE] if self.main else earlier:
            file.unlink(missing_ok=True)
        recording = Recording(model, steps, 0, self.main, self.meet, self.unit)
        recording.by_labels = True
        self.recordings = [recording]

    def begin(self, model: nn.Module, optimizer: Any, owners: list[Any]) -> None:
        """Record the optimizer steps from now on. ``owners``: the model as it is wrapped, among others."""
        (recording,) = self.recordings
        recording.moved_to(model)
        inner = getattr(optimizer, "optimizer", optimizer)
        self.optimizers.append(weakref.ref(inner))
        owners = [*owners, getattr(optimizer, "engine", None)]
        if engines := [one for one in owners if hasattr(one, "zero_optimization_stage")]:
            recording.attach_engine(engines[0], self.guarded, self._engine_stepped)
        elif any(isinstance(one, DistributedDataParallel) for one in owners):
            recording.wrapper = "ddp"
        elif any(type(one).__name__ == "FullyShardedDataParallel" for one in owners):
            recording.wrapper = "fsdp1"
        catch.follow(self)

    def end(self) -> None:
        """Write all that was recorded before the loop goes on."""
        self.let_go()
        for thread in self._threads:
            thread.join()
        (recording,) = self.recordings
        if recording.failed:
            raise RunFailed(recording.failed)
        if self.main:
            self._say_what()
        self.recordings = []

    def _say_what(self) -> None:
        (recording,) = self.recordings
        for file in self.unit.glob("rank*"):  # of an earlier loop with more processes
            if int(file.stem.removeprefix("rank")) >= ranks_here():
                file.unlink(missing_ok=True)
        model = {"model": 0, "class": recording.kind, "trained": len(recording.trace.trainable), "recorded": True,
                 "steps_seen": recording.steps_seen, "failed": None}  # fmt: skip
        document = Result("record").finish(
            recipe_sha256=None, device=None, recorded=sys.orig_argv, folder=str(self.folder), steps=self.steps, after=0,
            models=[model], not_seen=[],
        )  # fmt: skip
        (self.folder / FILE).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")

    def meet(self) -> None:
        """Not needed: see the class."""

    def saw_optimizer(self, optimizer: Any) -> None:
        """``begin`` is given the one."""

    def report(self) -> None:
        """There is no command that reads it."""

    def _recording_of(self, unit: nn.Module) -> None:
        """Others are not recorded."""

    def _fail(self, error: Exception) -> None:
        self.let_go()
        for recording in self.recordings:
            recording.forget()
        raise error
