"""Work after each optimizer step: logging, loss checks, evaluation, saving."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

from toolkit.data.loader import eval_batches, open_data
from toolkit.model.compiling import compilation, describe
from toolkit.tasks import task_of
from toolkit.training import checkpoint
from toolkit.training.guard import LossGuard, no_way_back, refusal
from toolkit.training.loop import Progress, evaluate
from toolkit.training.manifest import read_manifest
from toolkit.training.metrics import MetricsLog, Pending, StepRecord, peak_memory_bytes
from toolkit.training.screen import Screen
from toolkit.training.session import Session
from toolkit.training.watch import Marks


class Steps:
    """Called after each optimizer step; performs what is due. Every rank has one."""

    def __init__(
        self,
        session: Session,
        view: Screen,
        recorder: MetricsLog,
        folder: Path,
        progress: Progress,
        total: int,
        marks: Marks,
        start: Path | None,
        give_up: Callable[[], None],
    ) -> None:
        self.session, self.view, self.recorder = session, view, recorder
        self.folder, self.progress, self.total = folder, progress, total
        self.marks = marks
        self._give_up = give_up
        self._saving: checkpoint.Saving | None = None
        self.run = session.resolved.recipe.run
        self.guard = LossGuard(self.run, progress.recent)
        self.saved: Path | None = None
        # A checkpoint that was evaluated is not evaluated again, nor reported twice.
        self.eval_loss: float | None = read_manifest(start, deep=False)["eval_loss"] if start else None
        self._evaluated = 0 if self.eval_loss is None else progress.step
        self._whole = progress.step if start else 0
        """The last saved step, or the step that the run started with."""
        self._step_reported = False
        self._without_loss_reported = False
        self._compiled_reported = self._fell_back_reported = self._disk_reported = False
        self.eval_interval = session.resolved.recipe.eval_interval
        self._eval_samples = open_data(session.data_recipe, "eval", session.tokenizer) if self.eval_interval else None
        self.eval_notes: list[str] = [] if self._eval_samples is None else self._eval_samples.notes

    def __call__(self, pending: Pending) -> None:
        self.recorder.add(pending)
        self._tell_compiled()
        step, last = pending.step, pending.step == self.total
        if step % self.run.log_every == 0:
            self._log()
        # Evaluated before it is saved: a checkpoint knows how good it is.
        if self._eval_samples is not None and (step % self.eval_interval == 0 or last):
            self._timeless("evaluating", self._evaluate)
        if self.run.save_every and (step % self.run.save_every == 0 or last):
            self._timeless("saving", self._save)

    def finish(self, *, stopped: bool) -> None:
        """End of the run: log, evaluate and save what is pending. A stopped run does not evaluate."""
        self._log()
        if self._eval_samples is not None and self._evaluated != self.progress.step and not stopped:
            self._evaluate()
        self._settle()
        if self.run.save_every and self._whole != self.progress.step:
            self._save()
            self._settle()

    def close(self) -> None:
        """Complete, or report, the checkpoint that this rank is writing, however the run ended."""
        if self._saving is None:
            return
        self.marks.at(self.progress.step, "saving", untimed=True)
        if (problem := self._saving.finish()) is not None:
            self.view.say(f"{self._saving.target}: cannot be written: {problem}")

    def _tell_compiled(self) -> None:
        """Report compilation after the first step, and again if the compiler fails later; of the optimizer's step only
        its failure."""
        failed = getattr(self.session.engine.stepping(), "fell_back", None)
        if failed and not self._step_reported:
            self._step_reported = True
            self.view.say(f"optimizer.rounding: the step runs uncompiled, which is slower: {failed}")
        if not self.session.resolved.recipe.compile:
            return
        now = compilation()
        if not self._compiled_reported:
            self.view.say(f"compiled: {describe(now)}")
        elif now.fell_back and not self._fell_back_reported:
            self.view.say(f"  from step {self.progress.step} on: {describe(now)}")
        self._compiled_reported, self._fell_back_reported = True, bool(now.fell_back)

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
        self._tell_without_loss(records)
        if self.run.trackers:
            for record in records:
                values = {"loss": record.loss, "grad_norm": record.grad_norm, "lr": record.lr,
                          "supervised_tokens": record.tokens,
                          "tokens_per_second": record.tokens_per_second}  # fmt: skip
                values |= {f"lr_group_{at}": lr for at, lr in enumerate(record.group_lrs or [])}
                values |= record.group_values()
                self.session.accelerator.log({k: v for k, v in values.items() if v is not None}, step=record.step)
        for record in records:
            if (reason := self._wrong(record)) is not None:
                if self.guard.policy == "stop":
                    raise refusal(record.step, reason)
                self._roll_back(record.step, reason)
                break  # the later ones were taken from weights that are gone

    def _tell_without_loss(self, records: list[StepRecord]) -> None:
        """Report the first step without a supervised token; later ones show no loss, and are counted at the end."""
        first = next((record.step for record in records if record.without_loss), None)
        if first is not None and not self._without_loss_reported:
            self._without_loss_reported = True
            counted = task_of(self.session.resolved.recipe.model.task).labels.counted
            self.view.say(
                f"  step {first}: no supervised {counted}, so no loss and no gradient: momentum and weight decay alone "
                "move the weights; toolkit data shows which samples have nothing to learn"
            )

    def _wrong(self, record: StepRecord) -> str | None:
        """What is wrong with a completed step. An overflow under fp16 is normal, a step without a supervised token has
        no loss to judge."""
        scaled = self.session.resolved.precision.loss_scaling
        if self.guard.policy == "skip":
            lost = record.loss is None and not record.without_loss
            self.guard.skipped(record.skipped and (lost or not scaled), record.step)
            return None
        if record.skipped and scaled:
            return None
        reason = None
        if not record.without_loss:
            reason = self.guard.judge(math.nan if record.loss is None else record.loss)
        if reason is None and record.grad_norm is None:
            return "the gradient is not finite"
        return reason

    def _roll_back(self, step: int, reason: str) -> None:
        self.marks.at(step, "rolling back", untimed=True)
        self._settle()
        found = checkpoint.load_newest(self.session, self.folder / "checkpoints", self.view.say)
        start, back = found.path, found.progress
        if start is None:
            raise no_way_back(step, reason)
        self.guard.returned(back.step, step)
        self.guard.recent.clear()
        self.guard.recent.extend(back.recent)
        self.progress.updates = back.updates
        self.recorder.pause()
        self.view.say(f"  step {step}: {reason}; restored {start}, data continues after step {self.progress.step}")

    def _evaluate(self) -> None:
        session, resolved = self.session, self.session.resolved
        assert self._eval_samples is not None
        batches = eval_batches(
            self._eval_samples,
            resolved.recipe,
            resolved.micro_size,
            resolved.data_size,
            session.data_rank,
            resolved.device,
            part=resolved.row_part(session.rank),
        )
        loss, tokens = evaluate(session, batches)
        self.eval_loss = loss if math.isfinite(loss) else None  # JSON has no NaN
        step = self._evaluated = self.progress.step
        task = task_of(resolved.recipe.model.task)
        numbers, counted = task.numbers, task.labels.counted
        root = math.sqrt(loss) if numbers and math.isfinite(loss) else None
        if numbers and tokens:
            shown = "not finite" if root is None else f"{loss:.4f}, root {root:.4f},"
            self.view.say(f"  step {step}: held-out mean squared error {shown} over {tokens:,} {counted}")
        elif not tokens:
            self.view.say(f"  step {step}: no held-out loss: no supervised {counted} in data.eval")
        else:
            self.view.say(f"  step {step}: held-out loss {loss:.4f} over {tokens:,} {counted}")
        if (early := self.run.early_stopping) is not None:
            # The loss was summed over ranks in float64: every rank has the same, and decides the same.
            self.progress.improvement.judge(self.eval_loss, step, early)
            if self.progress.improvement.ends(early):
                self.view.say(f"  step {step}: {self.progress.improvement.reason()}: the run ends")
        if self.run.trackers and tokens:
            session.accelerator.log({"eval_loss": loss}, step=step)
        if session.accelerator.is_main_process:
            with (self.folder / "eval.jsonl").open("a", encoding="utf-8") as file:
                line = {"step": step, "loss": self.eval_loss, "tokens": tokens}
                line |= {"root_mean_squared_error": root} if numbers else {}
                file.write(json.dumps(line) + "\n")

    def _save(self) -> None:
        self._settle()
        step = self.progress.step
        self.progress.recent = list(self.guard.recent)
        eval_loss = self.eval_loss if self._evaluated == step else None
        self._saving = checkpoint.begin(
            self.session, self.folder / "checkpoints", self.progress, eval_loss, self._give_up
        )
        if not self._disk_reported and not self.session.shared_disk:
            self.view.say(
                f"  {self.folder} is not shared by all nodes: rank 0 collects and writes checkpoints alone; "
                "copy them to every node before --resume"
            )
        self._disk_reported = True
        if not self.run.async_save:
            self._settle()

    def _settle(self) -> None:
        """Wait for the checkpoint that is being written; every rank calls it."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            self.saved = saving.settle(self.session)
            self._whole = int(self.saved.name.removeprefix("step-"))
