"""Work after each optimizer step: logging, loss checks, evaluation, saving."""

from __future__ import annotations

import functools
import json
import math
import operator
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from toolkit.data.loader import eval_batches
from toolkit.data.samples import Samples, StreamSamples
from toolkit.model.compiling import compilation, describe
from toolkit.tasks import task_of
from toolkit.training import checkpoint
from toolkit.training.answers import Answers, shown
from toolkit.training.bad_loss import explain
from toolkit.training.guard import IN_A_ROW, SPAN, LossGuard, no_way_back, refusal
from toolkit.training.loop import Progress, evaluate
from toolkit.training.manifest import read_manifest
from toolkit.training.metrics import MetricsLog, Pending, StepRecord, peak_memory_bytes
from toolkit.training.scores import score_of
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
        held_out: Mapping[str, Samples],
        answers: Answers,
        place: Callable[[int], str] | None = None,
    ) -> None:
        """``place``: where the row of a training sample is; None where that is not known."""
        self.session, self.view, self.recorder = session, view, recorder
        self.folder, self.progress, self.total = folder, progress, total
        self.marks = marks
        self._give_up = give_up
        self._saving: checkpoint.Saving | None = None
        self.run = session.resolved.recipe.run
        self.guard = LossGuard(self.run, progress.recent)
        self.saved: Path | None = None
        # A checkpoint that was evaluated is not evaluated again, nor reported twice.
        manifest = read_manifest(start, deep=False) if start else {"eval_loss": None}
        self.eval_loss: float | None = manifest["eval_loss"]
        self.evaluation: dict[str, Any] | None = None
        """The line of eval.jsonl of the last evaluation of this process."""
        self._score: dict[str, Any] | None = manifest.get("score")
        self._evaluated: int | None = None if self.eval_loss is None else progress.step
        self._whole = progress.step if start else 0
        """The last saved step, or the step that the run started with."""
        self._step_reported = False
        self._without_loss_reported = False
        self._compiled_reported = self._fell_back_reported = self._disk_reported = False
        recipe = session.resolved.recipe
        self.eval_interval, self.sample_interval = recipe.eval_interval, recipe.sample_interval
        self._held_out = held_out
        self._answers = answers
        self._answered: int | None = None
        self._place = place
        self._before: deque[StepRecord] = deque(maxlen=SPAN)
        """The last steps that went well."""
        self._lost_in_a_row = 0
        self.eval_notes: list[str] = [note for samples in held_out.values() for note in samples.notes]

    def begin(self) -> None:
        """Evaluate before the first step of a run, with ``run.eval_at_start``."""
        if self.run.eval_at_start and self.progress.step == 0:
            if self._held_out:
                self._timeless("evaluating", self._evaluate)
            if self.sample_interval:
                self._timeless("answering", self._answer)

    def __call__(self, pending: Pending) -> None:
        self.recorder.add(pending)
        self._tell_compiled()
        step, last = pending.step, pending.step == self.total
        if step % self.run.log_every == 0:
            self._log()
        # Evaluated before it is saved: a checkpoint knows how good it is.
        if self._held_out and (step % self.eval_interval == 0 or last):
            self._timeless("evaluating", self._evaluate)
        if self.sample_interval and (step % self.sample_interval == 0 or last):
            self._timeless("answering", self._answer)
        if self.run.save_every and (step % self.run.save_every == 0 or last):
            self._timeless("saving", self._save)

    def finish(self, *, stopped: bool) -> None:
        """End of the run: log, evaluate and save what is pending. A stopped run does not evaluate."""
        self._log()
        if self._held_out and self._evaluated != self.progress.step and not stopped:
            self._evaluate()
        if self.sample_interval and self._answered != self.progress.step and not stopped:
            self._answer()
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
            self.view.say(failed)
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
                          "tokens_per_second": record.tokens_per_second,
                          "supervised_tokens_per_second": record.supervised_tokens_per_second}  # fmt: skip
                values |= {f"lr_group_{at}": lr for at, lr in enumerate(record.group_lrs or [])}
                values |= record.group_values()
                self.session.accelerator.log({k: v for k, v in values.items() if v is not None}, step=record.step)
        for record in records:
            if (reason := self._wrong(record)) is not None:
                why = self._why(record)
                if self.guard.policy == "stop":
                    raise refusal(record.step, reason, why)
                self._roll_back(record.step, reason, why)
                break  # the later ones were taken from weights that are gone
            self._before.append(record)

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
            bad = record.skipped and (lost or not scaled)
            last = bad and self.guard.in_a_row + 1 >= IN_A_ROW
            self.guard.skipped(bad, record.step, self._why(record) if last else ())
            return None
        if record.skipped and scaled:
            return self._overflow(record)
        reason = None
        if not record.without_loss:
            reason = self.guard.judge(math.nan if record.loss is None else record.loss)
        if reason is None and record.grad_norm is None:
            return "the gradient is not finite"
        return reason

    def _overflow(self, record: StepRecord) -> str | None:
        """Of a step that a loss scale skipped. A lower scale helps a gradient, but no loss, which has none in it."""
        lost = record.loss is None and not record.without_loss
        self._lost_in_a_row = self._lost_in_a_row + 1 if lost else 0
        return f"the loss is not finite, {IN_A_ROW} steps in a row" if self._lost_in_a_row >= IN_A_ROW else None

    def _why(self, record: StepRecord) -> list[str]:
        """Where and why a step went wrong; nothing for a spike, which is a finite loss. Every rank calls it."""
        if record.loss is not None and record.grad_norm is not None:
            return []
        self.marks.at(record.step, "looking for what was not finite", untimed=True)
        return explain(self.session, record, self.recorder.micros[record.step], self._before, self._place)

    def _roll_back(self, step: int, reason: str, why: list[str]) -> None:
        self.marks.at(step, "rolling back", untimed=True)
        self._settle()
        found = checkpoint.load_newest(self.session, self.folder / "checkpoints", self.view.say)
        start, back = found.path, found.progress
        if start is None:
            raise no_way_back(step, reason, why)
        self.guard.returned(back.step, step, why)
        self.guard.recent.clear()
        self.guard.recent.extend(back.recent)
        self.progress.updates = back.updates
        self.recorder.pause()
        self.view.say(f"  step {step}: {reason}; restored {start}, data continues after step {self.progress.step}")
        for line in why[:1]:
            self.view.say(f"    {line}")

    def _evaluate(self) -> None:
        session, resolved = self.session, self.session.resolved
        found = {
            name: evaluate(
                session,
                self.view.moving(
                    f"evaluating {name}".rstrip(),
                    eval_batches(
                        samples,
                        resolved.recipe,
                        resolved.micro_size,
                        resolved.data_size,
                        session.data_rank,
                        resolved.device,
                        part=resolved.row_part(session.rank),
                    ),
                    None
                    if isinstance(samples, StreamSamples)
                    else -(-len(samples) // (resolved.micro_size * resolved.data_size)),
                ),
            )
            for name, samples in self._held_out.items()
        }
        several = "" not in found
        if several:
            found[""] = functools.reduce(operator.add, found.values())
        step = self._evaluated = self.progress.step
        task, names = task_of(resolved.recipe.model.task), session.label_names
        values = {name: one.values(task, names) for name, one in found.items()}
        for name, one in found.items():
            where = f", {name}" if name else ", all" if several else ""
            self.view.say(f"  step {step}{where}: {one.told(task, names)}")
        self.eval_loss, self.evaluation = values[""]["loss"], {"step": step} | values[""]
        score = score_of(self.run.metric, values)
        self._score = score.to_json()
        if (early := self.run.early_stopping) is not None:
            # The loss was summed over ranks in float64: every rank has the same, and decides the same.
            self.progress.improvement.judge(score, step, early)
            if self.progress.improvement.ends(early):
                self.view.say(f"  step {step}: {self.progress.improvement.reason()}: the run ends")
        if self.run.trackers:
            session.accelerator.log(_tracked(values), step=step)
        if session.accelerator.is_main_process:
            with (self.folder / "eval.jsonl").open("a", encoding="utf-8") as file:
                for name, line in values.items():
                    which = {"eval_set": name} if name else {}
                    file.write(json.dumps({"step": step} | which | line) + "\n")

    def _answer(self) -> None:
        """Answers to ``run.sample_prompts``: on the screen, in samples.jsonl and in the trackers."""
        step = self._answered = self.progress.step
        found = [{"step": step} | one for one in self._answers.now(self.view.moving)]
        for one in found:
            self.view.say(f"  step {step}: {shown(one['prompt'], one['answer'])}")
        if self.run.trackers:
            texts = {f"sample_{at}": shown(one["prompt"], one["answer"]) for at, one in enumerate(found)}
            self.session.accelerator.log(texts, step=step)
        if self.session.accelerator.is_main_process:
            with (self.folder / "samples.jsonl").open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(one, ensure_ascii=False) + "\n" for one in found)

    def _save(self) -> None:
        self._settle()
        step = self.progress.step
        self.progress.recent = list(self.guard.recent)
        known = self._evaluated == step
        self._saving = checkpoint.begin(
            self.session,
            self.folder / "checkpoints",
            self.progress,
            self.eval_loss if known else None,
            self._give_up,
            self._score if known else None,
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


def _tracked(values: dict[str, dict[str, Any]]) -> dict[str, float]:
    """What trackers get of an evaluation: eval_loss, eval_accuracy, and of a set by name eval_NAME_loss."""
    return {
        f"eval_{name}_{key}" if name else f"eval_{key}": value
        for name, line in values.items()
        for key, value in line.items()
        if key != "tokens" and isinstance(value, float)
    }
