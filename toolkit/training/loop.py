"""The training loop. A window is one optimizer step: its micro-batches on all ranks, weighted by tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from toolkit.data.ahead import feed
from toolkit.data.collate import MicroBatch
from toolkit.model.batch_norm import counting, from_first_rank
from toolkit.model.head_loss import multiplied_by
from toolkit.model.loss_terms import LossTerms
from toolkit.optim.schedule import learning_rate
from toolkit.recipe.resolve import Resolved
from toolkit.training.average import evaluation_weights
from toolkit.training.early_stopping import Improvement
from toolkit.training.guard import LossGuard
from toolkit.training.loss import loss_sum
from toolkit.training.metrics import Pending
from toolkit.training.pipeline import run_window
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
        # Strategies average over data-parallel ranks; a window without a supervised token has gradient zero, not 0/0.
        weight = engine.gradient_divisor / tokens.clamp(min=1.0)
        loss = torch.zeros((), device=engine.device)
        now = _Window(session, terms, marks, progress.step, weight, loss, untimed=first)
        if engine.pipeline is not None:
            run_window(engine.pipeline, micros, len(window), now.forward, now.backward)
            loss = engine.pipeline.of_last_stage(now.loss)
        else:
            for micro in micros:
                with engine.accumulating(_is_last(micro)), counting(bool(micro.sample_ids)):
                    now.backward(now.forward(micro), micro)
            loss = now.loss
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
        if session.average is not None and not step.skipped:
            session.average.update(progress.updates)
        groups = engine.group_rates() if recipe.optimizer.groups else None
        squares = session.group_norms.after() if session.group_norms is not None else None
        after_step(Pending(progress.step, loss, tokens, step.grad_norm, lr, step.skipped, groups, squares))
        if stop and stop.after():
            return
        first = False
        marks.at(progress.step + 1, "reading data")


@dataclass
class _Window:
    """The micro-batches of one step. ``step``: steps taken before it; ``weight``: what their losses are multiplied by;
    ``loss``: what they have added up."""

    session: Session
    terms: LossTerms
    marks: Marks
    step: int
    weight: torch.Tensor
    loss: torch.Tensor
    untimed: bool

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
def evaluate(session: Session, batches: Iterable[MicroBatch]) -> tuple[float, int]:
    """Mean cross-entropy over the supervised tokens of every sample, and their number; every rank calls it. NaN where
    there is no such token. An optimizer that averages the weights has them evaluated at the average."""
    engine = session.engine
    total = torch.zeros(2, dtype=torch.float64, device=engine.device)
    from_first_rank(engine.batch_norms)
    engine.model.eval()
    try:
        with evaluation_weights(engine):
            for micro in batches:
                with engine.autocast():
                    there, task = micro.to(engine.device), session.resolved.recipe.model.task
                    loss = loss_sum(
                        engine.model,
                        engine.config,
                        there.tensors,
                        task,
                        part=micro.part,
                        balance=False,
                        bounds=there.bounds,
                    )
                total[0] += loss
                total[1] += micro.supervised
    finally:
        engine.model.train()
    if engine.pipeline is not None:
        total = engine.pipeline.of_last_stage(total)
    loss_total, count = counted_once(sum_over_ranks(total), session.resolved).tolist()
    return loss_total / count if count else math.nan, int(count)


def counted_once(summed: torch.Tensor, resolved: Resolved) -> torch.Tensor:
    """A sum over all processes as a sum over the parts of a window's tokens: ranks that share a part have added the
    same."""
    return summed if resolved.ranks_per_part == 1 else summed / resolved.ranks_per_part


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of ``tensor`` over all processes, on the device, without waiting for it there."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(tensor)
    return tensor
