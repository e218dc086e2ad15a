"""The training loop. A window is one optimizer step: its micro-batches on all ranks, weighted by tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from toolkit.data.ahead import feed
from toolkit.data.collate import MicroBatch
from toolkit.model.head_loss import multiplied_by
from toolkit.model.loss_terms import LossTerms
from toolkit.model.running_statistics import counting, from_first_rank
from toolkit.optim.schedule import learning_rate
from toolkit.recipe.resolve import Resolved
from toolkit.tasks import task_of
from toolkit.training.average import evaluation_weights
from toolkit.training.early_stopping import Improvement
from toolkit.training.guard import LossGuard
from toolkit.training.loss import loss_sum
from toolkit.training.metrics import MicroLoss, Pending
from toolkit.training.pipeline import run_window
from toolkit.training.scores import Counting, Evaluated
from toolkit.training.session import Session, seed_micro_batch
from toolkit.training.stop import Stop
from toolkit.training.watch import Marks


@dataclass
class Progress:
    """Progress of a run. ``updates`` counts the steps that changed the weights, excluding skipped ones."""

    step: int = 0
    updates: int = 0
    recent: list[float] = field(default_factory=list)
    """Recent losses, for the spike check."""
    improvement: Improvement = field(default_factory=Improvement)
    """Of the held-out loss, for ``run.early_stopping``."""
    extensions: list[dict[str, int]] = field(default_factory=list)
    """Length changes that changed the schedule: after which ``step``, ``from_steps`` and ``to_steps``."""


def train(
    session: Session,
    windows: Iterable[list[MicroBatch]],
    total_steps: int,
    progress: Progress,
    after_step: Callable[[Pending], None],
    *,
    stop: Stop | None = None,
    guard: LossGuard | None = None,
    marks: Marks | None = None,
) -> None:
    """Take optimizer steps until ``total_steps``, until ``run.early_stopping`` ends the run, or until all ranks have
    agreed to ``stop``. ``after_step`` logs,
    evaluates and saves; ``guard`` may skip a step for its loss; ``marks`` note how far this rank is.

    The loss of a window is the mean over the supervised tokens of all its micro-batches on all ranks, so its
    gradient is the full batch's, however ragged the micro-batches are.
    """
    resolved, engine = session.resolved, session.engine
    recipe, terms = resolved.recipe, LossTerms.of(resolved.recipe)
    warmup = resolved.warmup(total_steps)
    marks = marks or Marks()
    engine.skip_not_finite = guard is not None and guard.before_the_step
    first = True  # it compiles, opens connections and allocates
    for window, micros in feed(windows, engine.device):
        if progress.step >= total_steps or progress.improvement.ends(recipe.run.early_stopping):
            return
        at = progress.step + 1
        marks.at(at, "counting tokens", untimed=first)
        # Created on the device: a copy from the host would wait for all queued work.
        tokens = torch.full((), float(sum(m.supervised for m in window)), device=engine.device)
        if stop:
            tokens = stop.apart(sum_over_ranks(stop.beside(tokens)))
            if stop.now(engine.device):
                return
        else:
            tokens = sum_over_ranks(tokens)
        tokens = counted_once(tokens, resolved)
        loss, each = accumulate(session, micros, len(window), tokens, terms, marks, progress.step, untimed=first)
        marks.at(at, "optimizer step", untimed=first)
        engine.unscale()
        if session.group_norms is not None:
            session.group_norms.before()
        lr = learning_rate(recipe.schedule, resolved.lr, progress.updates, warmup, total_steps)
        before = _mean(loss, tokens, resolved) if guard and guard.before_the_step else None
        if guard and before is not None and guard.judge(before):
            step = engine.skip()
        else:
            step = engine.step(lr)
        progress.step += 1
        progress.updates += not step.skipped
        for shadow in () if step.skipped else session.shadows.values():
            shadow.update(progress.updates)
        groups = engine.group_rates() if recipe.optimizer.groups else None
        squares = session.group_norms.after() if session.group_norms is not None else None
        rows = torch.full((), float(sum(m.row_tokens for m in window)), device=engine.device)
        after_step(Pending(progress.step, loss, tokens, step.grad_norm, lr, step.skipped, groups, squares, rows, each))
        if stop and stop.after():
            return
        first = False
        marks.at(progress.step + 1, "reading data")


def accumulate(
    session: Session,
    micros: Iterator[MicroBatch],
    count: int,
    tokens: torch.Tensor,
    terms: LossTerms,
    marks: Marks,
    step: int,
    *,
    untimed: bool,
) -> tuple[torch.Tensor, list[MicroLoss]]:
    """Forward and backward of a window's ``count`` micro-batches, which are on the device; returns the sum of this
    rank's losses, and each of them. ``tokens``: the supervised ones of all ranks; ``step``: steps taken before. Every
    rank calls it."""
    engine = session.engine
    # Strategies average over data-parallel ranks; a window without a supervised token has gradient zero, not 0/0.
    weight = engine.gradient_divisor / tokens.clamp(min=1.0)
    now = _Window(session, terms, marks, step, weight, torch.zeros((), device=engine.device), untimed, [])
    if engine.pipeline is not None:
        run_window(engine.pipeline, micros, count, now.forward, now.backward)
        return engine.pipeline.of_last_stage(now.loss), now.each
    for micro in micros:
        with engine.accumulating(_is_last(micro)), counting(bool(micro.sample_ids)):
            now.backward(now.forward(micro), micro)
    return now.loss, now.each


@dataclass
class _Window:
    """The micro-batches of one step. ``step``: steps taken before it; ``weight``: what their losses are multiplied by;
    ``loss``: what they have added up; ``each``: their losses."""

    session: Session
    terms: LossTerms
    marks: Marks
    step: int
    weight: torch.Tensor
    loss: torch.Tensor
    untimed: bool
    each: list[MicroLoss]

    def forward(self, micro: MicroBatch) -> torch.Tensor:
        """The loss of a micro-batch, summed over its supervised tokens; on another stage than the last one zero."""
        session, engine, recipe = self.session, self.session.engine, self.session.resolved.recipe
        seed_micro_batch(recipe.run.seed, self.step, micro.micro, session.mask_rank)
        self._mark(f"micro-batch {micro.micro + 1}, forward")
        with engine.autocast(), multiplied_by(self.weight):
            task, part = recipe.model.task, micro.part
            return loss_sum(engine.model, engine.config, micro.tensors, task, self.terms, part, micro.bounds)

    def backward(self, loss: torch.Tensor, micro: MicroBatch) -> None:
        """Accumulate the gradient of a micro-batch's loss."""
        self._mark(f"micro-batch {micro.micro + 1}, backward")
        self.session.engine.backward(loss * self.weight, _is_last(micro))
        self.loss += loss.detach()
        self.each.append(MicroLoss(loss.detach(), micro.sample_ids))
        self._mark("reading ahead")

    def _mark(self, what: str) -> None:
        self.marks.at(self.step + 1, what, untimed=self.untimed)


def _is_last(micro: MicroBatch) -> bool:
    return micro.micro == micro.micro_count - 1


def _mean(loss: torch.Tensor, tokens: torch.Tensor, resolved: Resolved) -> float | None:
    """The window's loss, read synchronously; equal on every rank. None without a supervised token."""
    total, count = torch.stack([counted_once(sum_over_ranks(loss.double()), resolved), tokens.double()]).tolist()
    return total / count if count else None


@torch.no_grad()
def evaluate(session: Session, batches: Iterable[MicroBatch]) -> Evaluated:
    """Mean cross-entropy over the supervised tokens of every sample, their number, and the task's scores; every rank
    calls it. NaN where there is no such token. An optimizer that averages the weights has them evaluated at the
    average."""
    engine, task = session.engine, task_of(session.resolved.recipe.model.task)
    counting = Counting(task) if task.classes or task.numbers else None
    total = torch.zeros(2, dtype=torch.float64, device=engine.device)
    from_first_rank(engine.running)
    engine.model.eval()
    try:
        with evaluation_weights(engine):
            for micro in batches:
                with engine.autocast():
                    there = micro.to(engine.device)
                    observe = None if counting is None else partial(counting.add, sample_ids=micro.sample_ids)
                    loss = loss_sum(
                        engine.model,
                        engine.config,
                        there.tensors,
                        task.name,
                        part=micro.part,
                        balance=False,
                        bounds=there.bounds,
                        observe=observe,
                    )
                total[0] += loss
                total[1] += micro.supervised
    finally:
        engine.model.train()
    if engine.pipeline is not None:
        total = engine.pipeline.of_last_stage(total)
    combine = lambda tensor: counted_once(sum_over_ranks(tensor), session.resolved)  # noqa: E731
    loss_total, count = combine(total).tolist()
    scores = None if counting is None else counting.total(combine, engine.device)
    return Evaluated(loss_total / count if count else math.nan, int(count), scores)


def counted_once(summed: torch.Tensor, resolved: Resolved) -> torch.Tensor:
    """A sum over all processes as a sum over the parts of a window's tokens: ranks that share a part have added the
    same."""
    return summed if resolved.ranks_per_part == 1 else summed / resolved.ranks_per_part


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of ``tensor`` over all processes, on the device, without waiting for it there."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(tensor)
    return tensor
