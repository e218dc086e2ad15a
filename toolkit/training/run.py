"""One process of a training run, from its recipe to its last checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from toolkit.data.loader import TrainLoader, eval_batches, open_data
from toolkit.errors import InputError, NotSo, Stopped
from toolkit.launch.signals import attempt, handled, name_of
from toolkit.recipe.resolve import Resolved
from toolkit.results import Result
from toolkit.training import checkpoint
from toolkit.training.guard import LossGuard, refusal
from toolkit.training.loop import Progress, evaluate, sum_over_ranks, train
from toolkit.training.metrics import Pending, Recorder, StepRecord, peak_memory_bytes, truncate_metrics
from toolkit.training.screen import Screen, engaged_line, headline
from toolkit.training.session import Session, open_session
from toolkit.training.stop import Stop
from toolkit.training.watch import Marks, Watch

STOPPED = "stopped.json"
"""In a run's folder for as long as the run is to be gone on with: a batch system's script asks for it."""


def run(
    resolved: Resolved,
    *,
    resume: bool,
    screen: TextIO | None,
    connected: Callable[[], None] | None = None,
    stop: Stop | None = None,
    hung: Callable[[str], None] | None = None,
    again: str = "toolkit train RECIPE --resume",
) -> dict[str, Any]:
    """Train; returns the result (rank 0 also writes it to ``output_dir/result.json``). Every rank calls it.

    ``connected`` is called once the processes are. ``stop`` listens to signals once there is something to save.
    ``hung`` ends this process when the job stands still. ``again``: the command that goes on with this run.

    Raises InputError for what the recipe, the data or a checkpoint gets wrong, NotSo where training fails, Stopped
    where it was asked to stop and has saved.
    """
    result = Result("train")
    recipe = resolved.recipe
    folder = Path(recipe.run.output_dir)
    session = open_session(resolved, **_tracking(resolved, folder))
    if connected is not None:
        connected()
    main = session.accelerator.is_main_process
    samples = open_data(recipe, "train", session.tokenizer)
    passed_over: list[str] = []
    start = checkpoint.newest(folder / "checkpoints", passed_over.append) if resume else None
    progress = checkpoint.load(session, start) if start else Progress()
    loader = _loader(session, samples, progress.step)
    total = _total_steps(resolved, loader)
    if main:
        truncate_metrics(folder / "metrics.jsonl", progress.step)
        truncate_metrics(folder / "eval.jsonl", progress.step)
    view = Screen(screen if main else None, total, progress.step)
    for damage in passed_over:
        view.say(damage)
    _introduce(view, session, samples, start, resume)
    if main:
        (folder / STOPPED).unlink(missing_ok=True)
    recorder = Recorder(folder / "metrics.jsonl" if main else None, sum_over_ranks)
    marks = Marks()
    watch = Watch(marks, recipe.run.hang_after, hung) if hung else None
    stop = stop or Stop()
    try:
        steps = _Steps(session, view, recorder, folder, progress, total, marks, start)
        if hung:
            stop.listen(handled())
        if watch:
            watch.start()
        train(session, loader, total, progress, steps, stop=stop, guard=steps.guard, marks=marks)
        marks.at(progress.step, "ending", untimed=True)
        steps.finish(stopped=bool(stop.agreed))
        peaks = sum_over_ranks(_on_own_row(peak_memory_bytes(session.engine.device), session)).tolist()
    finally:
        if watch:
            watch.stop()
        view.close()
        recorder.close()
        for tracker in session.accelerator.trackers:
            tracker.finish()
    answer = result.finish(
        recipe_sha256=resolved.sha256,
        device=_device_name(session),
        final_loss=recorder.last.loss if recorder.last else None,
        steps=progress.step,
        skipped_steps=progress.step - progress.updates,
        tokens=recorder.tokens,
        tokens_per_second=round(recorder.tokens / recorder.seconds, 1) if recorder.seconds else None,
        peak_memory_bytes=[int(peak) for peak in peaks],
        checkpoint=str(steps.saved or start) if steps.saved or start else None,
        eval_loss=steps.eval_loss,
        best_checkpoint=_named(checkpoint.best(folder / "checkpoints")),
    )
    if main:
        (folder / "result.json").write_text(json.dumps(answer, indent=2) + "\n", encoding="utf-8")
        if stop.agreed and progress.step < total:
            note = {"signal": stop.agreed, "step": progress.step, "checkpoint": answer["checkpoint"]}
            (folder / STOPPED).write_text(json.dumps(note) + "\n", encoding="utf-8")
        else:
            view.say(_farewell(answer, folder))
    if dist.is_initialized():
        dist.barrier()  # no rank takes the group away while another still uses it
        session.accelerator.state.destroy_process_group()
    if stop.agreed and progress.step < total:
        raise Stopped(_stopped(stop.agreed, progress.step, answer["checkpoint"], again), stop.agreed)
    return answer


class _Steps:
    """What happens after each optimizer step: logging, evaluation, saving, each when its turn comes."""

    def __init__(
        self,
        session: Session,
        view: Screen,
        recorder: Recorder,
        folder: Path,
        progress: Progress,
        total: int,
        marks: Marks,
        start: Path | None,
    ) -> None:
        self.session, self.view, self.recorder = session, view, recorder
        self.folder, self.progress, self.total = folder, progress, total
        self.marks = marks
        self.run = session.resolved.recipe.run
        self.guard = LossGuard(self.run, progress.recent)
        self.saved: Path | None = None
        # A checkpoint that was evaluated is not evaluated again, nor told twice.
        self.eval_loss: float | None = checkpoint.read_manifest(start, deep=False)["eval_loss"] if start else None
        self._evaluated = 0 if self.eval_loss is None else progress.step
        self._whole = progress.step if start else 0
        """The step that is safe: saved, or the one that was begun with."""
        self.eval_interval = session.resolved.recipe.eval_interval
        self._eval_samples = (
            open_data(session.resolved.recipe, "eval", session.tokenizer) if self.eval_interval else None
        )

    def __call__(self, pending: Pending) -> None:
        self.recorder.add(pending)
        step, last = pending.step, pending.step == self.total
        if step % self.run.log_every == 0:
            self._log()
        # Evaluated before it is saved: a checkpoint knows how good it is.
        if self._eval_samples is not None and (step % self.eval_interval == 0 or last):
            self._timeless("evaluating", self._evaluate)
        if self.run.save_every and (step % self.run.save_every == 0 or last):
            self._timeless("saving", self._save)

    def finish(self, *, stopped: bool) -> None:
        """The end of the run: what was not yet logged, evaluated or saved. A run that stops does not evaluate."""
        self._log()
        if self._eval_samples is not None and self._evaluated != self.progress.step and not stopped:
            self._evaluate()
        if self.run.save_every and self._whole != self.progress.step:
            self._save()

    def _timeless(self, doing: str, action: Callable[[], None]) -> None:
        self._log()
        self.marks.at(self.progress.step, doing, untimed=True)
        action()
        self.recorder.pause()

    def _log(self) -> None:
        memory = peak_memory_bytes(self.session.engine.device)
        records = self.recorder.flush()
        if records:
            self.view.step(records[-1], memory)
        if self.run.trackers:
            for record in records:
                values = {"loss": record.loss, "grad_norm": record.grad_norm, "lr": record.lr,
                          "tokens_per_second": record.tokens_per_second}  # fmt: skip
                self.session.accelerator.log({k: v for k, v in values.items() if v is not None}, step=record.step)
        for record in records:
            if (reason := self._wrong(record)) is not None:
                if self.guard.policy == "stop":
                    raise refusal(record.step, reason)
                self._roll_back(record.step, reason)
                break  # the later ones were taken from weights that are gone

    def _wrong(self, record: StepRecord) -> str | None:
        """What is wrong with a step that was taken. One that overflowed under fp16 is as it should be."""
        scaled = self.session.resolved.precision.loss_scaling
        if self.guard.policy == "skip":
            self.guard.skipped(record.skipped and (record.loss is None or not scaled), record.step)
            return None
        if record.skipped and scaled:
            return None
        reason = self.guard.judge(math.nan if record.loss is None else record.loss)
        if reason is None and record.grad_norm is None:
            return "the gradient is not finite"
        return reason

    def _roll_back(self, step: int, reason: str) -> None:
        self.marks.at(step, "going back", untimed=True)
        start = checkpoint.newest(self.folder / "checkpoints", self.view.say)
        if start is None:
            raise NotSo(f"{refusal(step, reason)}\nrun.on_bad_loss: rollback: no checkpoint was saved before it")
        back = checkpoint.load(self.session, start)
        self.guard.returned(back.step, step)
        self.guard.recent.clear()
        self.guard.recent.extend(back.recent)
        self.progress.updates = back.updates
        self.recorder.pause()
        self.view.say(f"  step {step}: {reason}; weights of {start}, data from after step {self.progress.step}")

    def _evaluate(self) -> None:
        session, resolved = self.session, self.session.resolved
        assert self._eval_samples is not None
        batches = eval_batches(
            self._eval_samples,
            resolved.recipe,
            resolved.micro_size,
            resolved.world_size,
            session.accelerator.process_index,
            resolved.device,
        )
        loss, tokens = evaluate(session, batches)
        self.eval_loss = loss if math.isfinite(loss) else None  # JSON has no NaN
        step = self._evaluated = self.progress.step
        self.view.say(f"  step {step}: held-out loss {loss:.4f} over {tokens:,} tokens")
        if self.run.trackers:
            session.accelerator.log({"eval_loss": loss}, step=step)
        if session.accelerator.is_main_process:
            with (self.folder / "eval.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "loss": self.eval_loss, "tokens": tokens}) + "\n")

    def _save(self) -> None:
        step = self.progress.step
        self.progress.recent = list(self.guard.recent)
        eval_loss = self.eval_loss if self._evaluated == step else None
        self.saved = checkpoint.save(self.session, self.folder / "checkpoints", self.progress, eval_loss)
        self._whole = step


def _loader(session: Session, samples: Any, start: int) -> TrainLoader:
    resolved = session.resolved
    return TrainLoader(
        samples,
        resolved.recipe,
        micro_size=resolved.micro_size,
        accumulation=resolved.accumulation,
        world_size=resolved.world_size,
        rank=session.accelerator.process_index,
        device_type=resolved.device,
        start_window=start,
    )


def _total_steps(resolved: Resolved, loader: TrainLoader) -> int:
    run = resolved.recipe.run
    if run.max_steps is not None:
        return run.max_steps
    if loader.steps_per_epoch is None:
        raise InputError(f"{resolved.source}: run.epochs: a stream's length is not known; give run.max_steps")
    return (run.epochs or 1) * loader.steps_per_epoch


def _introduce(view: Screen, session: Session, samples: Any, start: Path | None, resume: bool) -> None:
    trained = sum(math.prod(shape) for shape in session.engine.shapes.values())
    view.say(headline(session.resolved, trained, session.weights))
    view.say(engaged_line(session.claims))
    for note in samples.notes:
        view.say(f"note: {note}")
    if attempt():
        view.say(f"started again by itself, attempt {attempt() + 1}")
    if start:
        view.say(f"resumed from {start}")
    elif resume:
        view.say("nothing to resume from: starting at step 0")


def _tracking(resolved: Resolved, folder: Path) -> dict[str, Any]:
    trackers = resolved.recipe.run.trackers
    return {"log_with": list(trackers), "project_dir": str(folder)} if trackers else {}


def _on_own_row(value: int, session: Session) -> torch.Tensor:
    rows = torch.zeros(session.resolved.world_size, dtype=torch.float64, device=session.engine.device)
    rows[session.accelerator.process_index] = value
    return rows


def _device_name(session: Session) -> str:
    if session.engine.device.type == "cuda":
        return torch.cuda.get_device_name(session.engine.device)
    return "cpu"


def _named(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _stopped(number: int, step: int, saved: str | None, again: str) -> str:
    told = f"stopped by {name_of(number)} after step {step}"
    if saved is None:
        return f"{told}; nothing was saved" + (" (run.save_every: 0)" if step else "")
    return f"{told}, saved in {saved}\ngo on with: {again}"


def _farewell(answer: dict[str, Any], folder: Path) -> str:
    loss = "" if answer["final_loss"] is None else f" · loss {answer['final_loss']:.4f}"
    rate = "" if answer["tokens_per_second"] is None else f" · {answer['tokens_per_second']:,.0f} tok/s"
    told = f"done: {answer['steps']} steps{loss} · {answer['tokens']:,} tokens{rate} · {answer['seconds']:.0f} s"
    if answer["checkpoint"] is None:
        return f"{told}\nnothing was saved (run.save_every: 0) · metrics in {folder}/metrics.jsonl"
    return f"{told}\nnext: toolkit export {answer['checkpoint']} -o {folder}/export"
