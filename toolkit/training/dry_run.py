"""`toolkit train --dry-run`: one forward and backward of the longest micro-batch, with all that a run has before it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from toolkit.data.loader import TrainLoader
from toolkit.errors import RunFailed
from toolkit.model.loss_terms import LossTerms
from toolkit.training.loop import accumulate, counted_once, sum_over_ranks
from toolkit.training.metrics import peak_memory_bytes
from toolkit.training.session import Session
from toolkit.training.watch import Marks


@dataclass(frozen=True)
class DryRun:
    """``loss``: the mean over the supervised tokens of every rank's micro-batch. ``name`` and ``shape``: of this rank's
    input. ``peaks``: bytes by rank, ``allocated`` on a GPU or resident on a CPU."""

    loss: float
    name: str
    shape: tuple[int, ...]
    peaks: list[int]
    allocated: bool

    def lines(self) -> list[str]:
        """For the screen."""
        shape = " x ".join(map(str, self.shape))
        each = ", ".join(f"{peak / 2**30:.2f} GiB on rank {rank}" for rank, peak in enumerate(self.peaks))
        kind = "allocated" if self.allocated else "resident"
        return [
            f"dry run: forward and backward of the longest micro-batch ({self.name} {shape}) · loss {self.loss:.4f}",
            f"peak memory ({kind}, before the optimizer's first update): {each}",
        ]

    def to_json(self) -> dict[str, object]:
        """For the command's JSON."""
        return {"loss": self.loss, "input": self.name, "shape": list(self.shape)}


def dry_run(session: Session, loader: TrainLoader, marks: Marks) -> DryRun:
    """Every rank calls it. Raises RunFailed if the loss is not finite."""
    engine, resolved = session.engine, session.resolved
    micro = loader.longest()
    tokens = torch.full((), float(micro.supervised), device=engine.device)
    tokens = counted_once(sum_over_ranks(tokens), resolved)
    terms, there = LossTerms.of(resolved.recipe), micro.to(engine.device)
    loss, _ = accumulate(session, iter([there]), 1, tokens, terms, marks, step=0, untimed=True)
    mean = (counted_once(sum_over_ranks(loss.double()), resolved) / tokens.clamp(min=1.0)).item()
    if not math.isfinite(mean):
        raise RunFailed(f"the loss of the longest micro-batch is {mean}: the run would stop at a step that has it")
    peaks = torch.zeros(resolved.world_size, dtype=torch.float64, device=engine.device)
    peaks[session.rank] = peak_memory_bytes(engine.device)
    name = max(micro.tensors, key=lambda one: (one == "input_ids", micro.tensors[one].numel()))
    shape = tuple(micro.tensors[name].shape)
    return DryRun(
        mean, name, shape, [int(peak) for peak in sum_over_ranks(peaks).tolist()], engine.device.type == "cuda"
    )
