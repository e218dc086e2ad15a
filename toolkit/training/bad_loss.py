"""Where a loss or a gradient was not finite, and why as far as a run can tell: measured once it has happened."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist

from toolkit.training.metrics import MicroLoss, StepRecord
from toolkit.training.session import Session

_ROWS = 3
"""Rows of a micro-batch that are named."""
_GROWTH = 10.0
"""Times that the gradient's norm has grown in the last steps, from which on it is a likely cause."""


@dataclass(frozen=True)
class Counted:
    """Elements of weights on all ranks that are not finite, and all. ``frozen``: of those that do not train."""

    trained: tuple[int, int]
    frozen: tuple[int, int]


def explain(
    session: Session,
    record: StepRecord,
    micros: Sequence[MicroLoss],
    before: Sequence[StepRecord],
    place: Callable[[int], str] | None,
) -> list[str]:
    """Lines: which micro-batches and rows, what of gradients and weights, and likely causes in their order. Every rank
    calls it, after the step.

    ``micros``: this rank's, of the step; ``before``: the steps before it, the last one last; ``place``: where the row
    of a sample is, None where that is not known.
    """
    table = _over_ranks(_row(micros), session)
    counted = _count(session)
    lines = [_which(table, place), _state(record, before, table, counted)]
    causes = _causes(session, record, before, table, counted)
    return [*lines, "likely causes, in this order:", *(f"  {at}. {cause}" for at, cause in enumerate(causes, 1))]


def _row(micros: Sequence[MicroLoss]) -> list[float]:
    """How many micro-batches there are, how many have a loss that is not finite, the first of these (from 1), and its
    first samples, each plus 1."""
    finite = [math.isfinite(value) for value in torch.stack([one.loss for one in micros]).tolist()] if micros else []
    bad = [at for at, fine in enumerate(finite) if not fine]
    ids = micros[bad[0]].sample_ids[: _ROWS + 1] if bad else []
    numbers = [number + 1 for number in ids] + [0] * (_ROWS + 1 - len(ids))
    return [len(micros), len(bad), bad[0] + 1 if bad else 0, *numbers]


def _over_ranks(row: Sequence[float], session: Session) -> list[list[int]]:
    """Every rank's row."""
    table = torch.zeros(session.resolved.world_size, len(row), dtype=torch.float64, device=session.engine.device)
    table[session.rank] = torch.tensor(row, dtype=torch.float64)
    return [[int(value) for value in one] for one in _summed(table).tolist()]


def _count(session: Session) -> Counted:
    engine = session.engine
    frozen = [p for p in chain(engine.model.parameters(), engine.model.buffers()) if not p.requires_grad]
    # ZeRO-3 has its part of a frozen weight beside an empty one.
    parts = [getattr(p, "ds_tensor", p) for p in frozen]
    local = [p.to_local() if hasattr(p, "to_local") else p.detach() for p in parts]
    found = torch.zeros(4, dtype=torch.float64, device=engine.device)
    for at, tensors in ((0, engine.masters()), (2, local)):
        for tensor in tensors:
            if tensor.is_floating_point() and tensor.element_size() > 1 and tensor.numel():
                found[at] += (~torch.isfinite(tensor)).sum().to(found)
                found[at + 1] += tensor.numel()
    trained_bad, trained, frozen_bad, all_frozen = (int(value) for value in _summed(found).tolist())
    return Counted((trained_bad, trained), (frozen_bad, all_frozen))


def _summed(tensor: torch.Tensor) -> torch.Tensor:
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def _which(table: Sequence[Sequence[int]], place: Callable[[int], str] | None) -> str:
    micros, bad = sum(row[0] for row in table), sum(row[1] for row in table)
    if not bad:
        return f"the losses of all {micros} micro-batches are finite: the gradient overflowed in the backward"
    rank = next(at for at, row in enumerate(table) if row[1])
    first = f"rank {rank}, micro-batch {table[rank][2]}"
    ids = [number - 1 for number in table[rank][3:] if number]
    rows = ""
    if place is not None and ids:
        rows = f" ({'; '.join(map(place, ids[:_ROWS]))}{', ...' if len(ids) > _ROWS else ''})"
    if bad == 1:
        return f"not finite: {first}{rows}, and none of the other {micros - 1} micro-batches"
    return f"not finite: {bad} of {micros} micro-batches, first {first}{rows}"


def _state(record: StepRecord, before: Sequence[StepRecord], table: Sequence[Sequence[int]], counted: Counted) -> str:
    """Whether the gradients and weights before the step were finite."""
    if before:
        last = before[-1]
        norm = "not finite" if last.grad_norm is None else f"{last.grad_norm:.3g}"
        loss = "none" if last.loss is None else f"{last.loss:.4f}"
        gradients = f"step {last.step} before it: loss {loss}, gradient norm {norm}"
    else:
        gradients = "it is the first step of this process"
    bad, every = counted.trained
    if record.skipped:
        weights = f"{bad} of {every} elements not finite" if bad else "finite"
    elif any(row[1] < row[0] for row in table):
        weights = "finite, since other micro-batches of the step have a finite loss"
    else:
        weights = f"not known, the step has changed them ({bad} of {every} elements are not finite now)"
    return f"{gradients}; weights before this step: {weights}"


def _causes(
    session: Session,
    record: StepRecord,
    before: Sequence[StepRecord],
    table: Sequence[Sequence[int]],
    counted: Counted,
) -> list[str]:
    recipe, bad = session.resolved.recipe, sum(row[1] for row in table)
    some = 0 < bad < sum(row[0] for row in table)
    found = []
    if counted.frozen[0]:
        found.append(f"{counted.frozen[0]} elements of frozen weights or buffers are not finite: load the model again")
    if record.skipped and counted.trained[0]:
        found.append("the weights are not finite: go back to a checkpoint that was saved before they were")
    if session.resolved.precision.compute == "float16":
        found.append("fp16 holds no number above 65504: precision=bf16 where the GPU has it, else fp32")
    norms = [one.grad_norm for one in before if one.grad_norm is not None]
    grown = len(norms) > 1 and norms[-1] > _GROWTH * min(norms)
    if grown:
        growth = f"the gradient's norm grew from {min(norms):.3g} to {norms[-1]:.3g}"
        found.append(f"{growth}: a lower optimizer.lr or a longer warm-up")
    if some:
        found.append("what these rows contain: --resume run.on_bad_loss=skip leaves them out")
    if not grown:
        found.append(f"the learning rate, {record.lr:.3g} at this step: a lower optimizer.lr or a longer warm-up")
    if not session.resolved.max_grad_norm:
        found.append("nothing clips the gradient: optimizer.max_grad_norm=1.0")
    if not before and not some and recipe.model.path:
        found.append(f"the weights of {recipe.model.path} themselves, which the first step read: load them elsewhere")
    return found
