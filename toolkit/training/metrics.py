"""Metrics of a run: metrics.jsonl (a line per optimizer step), the trackers, and the screen."""

from __future__ import annotations

import json
import math
import resource
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class StepRecord:
    """One line of metrics.jsonl. ``loss``: mean over the window's supervised tokens, all ranks, null where it was not
    finite or there was no such token; ``tokens``: how many those were; ``grad_norm``: before clipping, null where it
    was not finite. ``tokens_per_second`` counts the tokens of the rows, supervised or not, without padding
    (``MicroBatch.row_tokens``)."""

    step: int
    loss: float | None
    grad_norm: float | None
    lr: float
    tokens: int
    tokens_per_second: float
    supervised_tokens_per_second: float
    skipped: bool
    group_lrs: list[float] | None = None
    """Of ``optimizer.groups``, in their order; None if the recipe has none. ``lr`` is that of all other parameters."""
    group_grad_norms: list[float | None] | None = None
    """``run.group_norms``: 2-norms of each group's gradient before clipping; the last is that of all parameters in no
    group. None without the key; an entry is null where it was not finite."""
    group_update_norms: list[float | None] | None = None
    """Of what the step added to the weights."""
    group_weight_norms: list[float | None] | None = None
    """Of the weights before the step."""

    @property
    def without_loss(self) -> bool:
        """Whether the window had no supervised token: a mean over nothing, which is no loss of 0."""
        return self.tokens == 0

    def group_values(self) -> dict[str, float | None]:
        """The norms of each group as trackers get them."""
        kinds = {"grad": self.group_grad_norms, "update": self.group_update_norms, "weight": self.group_weight_norms}
        return {f"{kind}_norm_group_{at}": norm for kind, norms in kinds.items() for at, norm in enumerate(norms or [])}

    def line(self) -> dict[str, Any]:
        """The line of metrics.jsonl."""
        return {key: value for key, value in asdict(self).items() if value is not None or key in _ALWAYS}


_ALWAYS = ("loss", "grad_norm")


@dataclass(frozen=True)
class MicroLoss:
    """The loss of one micro-batch, summed over its supervised tokens, still on the device, and its samples."""

    loss: torch.Tensor
    sample_ids: list[int]


@dataclass
class Pending:
    """A step whose numbers are still on the device."""

    step: int
    loss_sum: torch.Tensor
    tokens: torch.Tensor
    grad_norm: torch.Tensor
    lr: float
    skipped: bool
    group_lrs: list[float] | None = None
    group_squares: torch.Tensor | None = None
    """``run.group_norms``: what ``GroupNorms.after`` returns, of this rank."""
    row_tokens: torch.Tensor | None = None
    """Of this rank (``MicroBatch.row_tokens``); None: as many as are supervised on all ranks."""
    micros: list[MicroLoss] = field(default_factory=list)
    """Of this rank."""


class MetricsLog:
    """Keeps metrics on the device until they are logged, so that steps do not synchronise.

    Every rank calls ``add`` and ``flush`` (the loss is summed over ranks on flush); rank 0 writes.
    """

    def __init__(self, path: Path | None, sum_over_ranks: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._sum = sum_over_ranks
        self._pending: list[Pending] = []
        self._file = path.open("a", encoding="utf-8") if path else None
        self._since = time.perf_counter()
        self.tokens = self.row_tokens = 0
        self.seconds = 0.0
        self.without_loss = 0
        """Steps without a supervised token."""
        self.last: StepRecord | None = None
        self.micros: dict[int, list[MicroLoss]] = {}
        """By step, of those that were flushed last."""

    def add(self, pending: Pending) -> None:
        self._pending.append(pending)

    def flush(self) -> list[StepRecord]:
        """Copy the pending steps to the host: the only device synchronisation of logging."""
        if not self._pending:
            return []
        known = [p.row_tokens for p in self._pending if p.row_tokens is not None]
        sums = self._sum(torch.stack([each.double() for each in (*(p.loss_sum for p in self._pending), *known)]))
        counts = torch.stack([p.tokens.double() for p in self._pending])
        found = torch.cat([sums, counts]).tolist()
        losses, rows, tokens = (found[: len(counts)], found[len(counts) : -len(counts)], found[-len(counts) :])
        rows = rows or tokens
        norms = [float(p.grad_norm) for p in self._pending]  # nothing is left to wait for
        now = time.perf_counter()
        elapsed, self._since = now - self._since, now
        row_rate, rate = (sum(each) / elapsed if elapsed else 0.0 for each in (rows, tokens))
        self.tokens += int(sum(tokens))
        self.row_tokens += int(sum(rows))
        self.seconds += elapsed
        records = [
            StepRecord(
                p.step,
                _finite(loss / count) if count else None,
                _finite(norm),
                p.lr,
                int(count),
                round(row_rate, 1),
                round(rate, 1),
                p.skipped,
                p.group_lrs,
                *groups,
            )
            for p, loss, count, norm, groups in zip(self._pending, losses, tokens, norms, self._groups(), strict=True)
        ]
        self.micros = {p.step: p.micros for p in self._pending}
        self._pending = []
        self.last = records[-1]
        self.without_loss += sum(record.without_loss for record in records)
        if self._file:
            self._file.writelines(json.dumps(record.line()) + "\n" for record in records)
            self._file.flush()
        return records

    def _groups(self) -> list[list[list[float | None]]]:
        """Norms by group of every pending step: of gradients, updates, weights; empty lists without them."""
        squares = [p.group_squares for p in self._pending if p.group_squares is not None]
        if not squares:
            return [[] for _ in self._pending]
        norms = self._sum(torch.stack(squares).double()).sqrt().tolist()
        return [[[_finite(norm) for norm in kind] for kind in step] for step in norms]

    def pause(self) -> None:
        """Exclude the time since the last flush from tokens/s: evaluation and saving are not training."""
        self._since = time.perf_counter()

    def close(self) -> None:
        if self._file:
            self._file.close()


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def peak_memory_bytes(device: torch.device) -> int:
    """Peak bytes of this process: allocated on the GPU, or resident on a CPU (ru_maxrss is in KiB on Linux)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def set_aside(path: Path) -> Path | None:
    """Rename the metrics of a run that starts again at step 0, so that its curve is kept: metrics.before-1.jsonl.
    Returns the new name; None where there is nothing to keep."""
    if not path.exists() or not path.stat().st_size:
        return None
    number = 1
    while (kept := path.with_name(f"{path.stem}.before-{number}{path.suffix}")).exists():
        number += 1
    return path.rename(kept)


def truncate_metrics(path: Path, last_step: int) -> None:
    """Remove the lines after ``last_step``: steps that a resumed run repeats."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry: dict[str, Any] = json.loads(line)
        except ValueError:
            continue  # a line cut off by the end of the earlier process
        if entry["step"] <= last_step:
            kept.append(line + "\n")
    path.write_text("".join(kept), encoding="utf-8")
