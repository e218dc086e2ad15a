"""What an evaluation measures beside the loss: accuracy and F1 of classes, Pearson's correlation of numbers.

Each rank counts its own samples. Classes are counted in whole numbers; numbers are put in the order of the samples: the
result is the same for every number of processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from toolkit.tasks.base import Task
from toolkit.tasks.labels import IGNORED

Combine = Callable[[torch.Tensor], torch.Tensor]
"""Adds a float64 tensor up over all processes; what several of them have computed counts once."""


@dataclass(frozen=True)
class Classes:
    """``counts``: float64 of shape (3, classes): labels, predictions, and predictions that are right, by class."""

    counts: torch.Tensor

    def __add__(self, other: Classes) -> Classes:
        return Classes(self.counts + other.counts)

    def values(self, names: Sequence[str] | None) -> dict[str, Any]:
        """``accuracy``; ``f1``, the mean of the F1 of every class that is a label or a prediction; ``f1_by_label``."""
        labels, predicted, right = self.counts.tolist()
        found = {
            (names[at] if names and at < len(names) else str(at)): 2 * hits / (given + told)
            for at, (given, told, hits) in enumerate(zip(labels, predicted, right, strict=True))
            if given + told
        }
        if not found:
            return {"accuracy": None, "f1": None, "f1_by_label": {}}
        return {"accuracy": sum(right) / sum(labels), "f1": sum(found.values()) / len(found), "f1_by_label": found}


@dataclass(frozen=True)
class Numbers:
    """``told``, ``labels``: float64 of shape (samples,), in the order of the samples."""

    told: torch.Tensor
    labels: torch.Tensor

    def __add__(self, other: Numbers) -> Numbers:
        return Numbers(torch.cat([self.told, other.told]), torch.cat([self.labels, other.labels]))

    def values(self, names: Sequence[str] | None) -> dict[str, Any]:
        """``pearson``: None where the predictions, or the labels, are all equal."""
        x, y = (each - each.mean() for each in (self.told, self.labels))
        spread = math.sqrt(float(x.square().sum())) * math.sqrt(float(y.square().sum()))
        found = float((x * y).sum()) / spread if spread > 0 else math.nan
        return {"pearson": max(-1.0, min(1.0, found)) if math.isfinite(found) else None}


Scores = Classes | Numbers


class Counting:
    """The scores of one evaluation, on this rank. ``add`` is called with each micro-batch's outputs."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._counts: torch.Tensor | None = None
        self._ids: list[int] = []
        self._numbers: list[torch.Tensor] = []

    def add(self, logits: torch.Tensor, labels: torch.Tensor, sample_ids: Sequence[int]) -> None:
        """``logits``: (predictions, classes) and ``labels``: (predictions,) of classes; (samples, 1) and the numbers'
        bits of numbers. Nothing waits for the device."""
        if self._task.classes:
            self._count(logits, labels)
        elif sample_ids:
            told = logits.reshape(-1)[: len(sample_ids)].float()
            numbers = labels[: len(sample_ids)].to(torch.int32).view(torch.float32)
            self._ids += sample_ids
            self._numbers.append(torch.stack([told, numbers]))

    def _count(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        if self._counts is None:
            self._counts = logits.new_zeros((3, logits.shape[-1]), dtype=torch.float64)
        kept = labels != IGNORED
        given, told = labels.masked_fill(~kept, 0), logits.argmax(-1)
        for row, (classes, weight) in enumerate(((given, kept), (told, kept), (given, kept & (given == told)))):
            self._counts[row].index_add_(0, classes, weight.double())

    def total(self, combine: Combine, device: torch.device) -> Scores:
        """The scores of all ranks; every rank calls it."""
        if self._task.classes:
            assert self._counts is not None
            return Classes(combine(self._counts).cpu())
        most = torch.tensor(max(self._ids, default=-1) + 1, device=device)
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
        dense = torch.zeros((3, int(most)), dtype=torch.float64, device=device)
        if self._ids:
            at = torch.tensor(self._ids, device=device)
            dense[:2, at] = torch.cat(self._numbers, dim=1).double()
            dense[2, at] = 1.0
        told, labels, there = combine(dense).cpu()
        return Numbers(told[there > 0], labels[there > 0])


@dataclass(frozen=True)
class Evaluated:
    """The held-out ``loss``, a mean over ``tokens`` predictions, NaN of none; the scores of tasks that have some."""

    loss: float
    tokens: int
    scores: Scores | None = None

    def __add__(self, other: Evaluated) -> Evaluated:
        tokens = self.tokens + other.tokens
        total = sum(one.loss * one.tokens for one in (self, other) if one.tokens)
        loss = total / tokens if tokens else math.nan
        both = None if self.scores is None or other.scores is None else self.scores + other.scores  # type: ignore[operator]
        return Evaluated(loss, tokens, both)

    def values(self, task: Task, names: Sequence[str] | None) -> dict[str, Any]:
        """The line of eval.jsonl, without the step. JSON has no NaN: what is not finite is None."""
        loss = self.loss if math.isfinite(self.loss) else None
        found: dict[str, Any] = {"loss": loss, "tokens": self.tokens}
        if task.numbers:
            found["root_mean_squared_error"] = None if loss is None else math.sqrt(loss)
        return found | ({} if self.scores is None else self.scores.values(names))

    def told(self, task: Task, names: Sequence[str] | None) -> str:
        """For the screen."""
        values = self.values(task, names)
        over = f"over {self.tokens:,} {task.labels.counted}"
        if not self.tokens:
            return f"no held-out loss: no supervised {task.labels.counted} in data.eval"
        if task.numbers:
            root = values["root_mean_squared_error"]
            error = "not finite" if root is None else f"{self.loss:.4f}, root {root:.4f},"
            told = f"held-out mean squared error {error} {over}"
        else:
            told = f"held-out loss {self.loss:.4f} {over}"
        for name, title in (("accuracy", "accuracy"), ("f1", "F1"), ("pearson", "Pearson's r")):
            if name in values:
                told += f" · {title} {'undefined' if values[name] is None else f'{values[name]:.4f}'}"
        return told


@dataclass(frozen=True)
class Score:
    """What ``run.metric`` names, of one evaluation. ``value``: None where it is not defined, or not finite."""

    metric: str
    value: float | None

    @property
    def larger_is_better(self) -> bool:
        """For all but losses."""
        return not self.metric.endswith("eval_loss")

    def to_json(self) -> dict[str, Any]:
        return {"metric": self.metric, "value": self.value, "larger_is_better": self.larger_is_better}


def score_of(metric: str, values: dict[str, dict[str, Any]]) -> Score:
    """The score of ``run.metric``. ``values``: of every held-out set by name, those of all together under ""."""
    held_out, _, name = metric.rpartition(".")
    return Score(metric, values[held_out]["loss" if name == "eval_loss" else name])
