"""What was seen of a run, step by step, on one rank: recorded there, compared elsewhere."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from toolkit.model.compiling import Compilation
from toolkit.strategies.engines.base import OptimizerState
from toolkit.strategies.engines.claims import Claim
from toolkit.verification.record.block_inputs import BlockInputs
from toolkit.verification.record.plain_form import load_plain, save_plain

Tensors = dict[str, torch.Tensor]


@dataclass
class MicroTrace:
    """One forward: the rows' tensors, and the loss, summed over supervised tokens. ``part``: which of how many parts of
    the rows this rank computed; None for all."""

    tensors: Tensors
    loss: float
    part: tuple[int, int] | None = None


@dataclass
class StepTrace:
    """One optimizer step of one rank. Tensors are whole, on the CPU, and kept by rank 0 only; digests by all.

    ``gradient``: unscaled, before clipping, None where the parameter has none. ``weights``, ``states``: after the
    step. ``copies``: digests of the whole live parameters, where this rank holds them whole. ``lr``: every learning
    rate of the step; ``rates``: by parameter, where the optimizer's groups name theirs.
    """

    step: int
    micros: list[MicroTrace] = field(default_factory=list)
    loss_scale: float = 1.0
    updates_before: int = 0
    gradient: dict[str, torch.Tensor | None] = field(default_factory=dict)
    gradient_digests: dict[str, str] = field(default_factory=dict)
    norm: float = float("nan")
    skipped: bool = False
    lr: list[float] = field(default_factory=list)
    rates: dict[str, float] = field(default_factory=dict)
    weights: Tensors = field(default_factory=dict)
    states: dict[str, OptimizerState | None] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    averages: Tensors = field(default_factory=dict)
    """What options keep of the weights (``Option.shadow``), as WEIGHT.OPTION: after the step."""
    statistics: Tensors = field(default_factory=dict)
    """Running statistics after the step, of this rank."""


@dataclass(frozen=True)
class Product:
    """One product that was held against its definition. ``kind``: output, gradient of the input or of the weight.
    ``error``: of the worst element, in units of what rounding explains."""

    step: int
    micro: int
    layer: str
    kind: str
    error: float


@dataclass
class Evaluated:
    """An evaluation of the first window between two steps, of an optimizer that averages the weights. ``after``: steps
    taken. ``loss``: mean over the window's supervised tokens. ``weights``: as it began, whole; rank 0 has them."""

    after: int
    loss: float
    weights: Tensors = field(default_factory=dict)


@dataclass
class RunTrace:
    """A run of one rank, from its first weights on."""

    weights: Tensors = field(default_factory=dict)
    statistics: Tensors = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    states: dict[str, OptimizerState | None] = field(default_factory=dict)
    averages: Tensors = field(default_factory=dict)
    frozen: dict[str, str] = field(default_factory=dict)
    frozen_after: dict[str, str] = field(default_factory=dict)
    steps: list[StepTrace] = field(default_factory=list)
    evaluated: Evaluated | None = None

    def weights_before(self, step: int) -> Tensors:
        """The weights that a step begins with."""
        return self.weights if step == 0 else self.steps[step - 1].weights


@dataclass
class RankTrace:
    """All that one rank saw. ``failure``: why its strategy never engaged, where it did not."""

    rank: int
    failure: str | None = None
    run: RunTrace = field(default_factory=RunTrace)
    resumed: RunTrace | None = None
    exported: Tensors | None = None
    claims: list[Claim] = field(default_factory=list)
    trainable: list[str] = field(default_factory=list)
    decayed: list[str] = field(default_factory=list)
    dtypes: dict[str, list[str]] = field(default_factory=dict)
    inputs: BlockInputs = field(default_factory=dict)
    """What the blocks were given in the first micro-batch."""
    recomputed: list[int] = field(default_factory=list)
    forwards: int = 0
    fused: int = 0
    """Forwards whose head answered with the loss in place of logits."""
    options: dict[str, int] = field(default_factory=dict)
    """Forwards in training that each option of the recipe was active in, by its name; or, below, ``operators``."""
    offloaded: list[tuple[int, int, int]] = field(default_factory=list)
    """Of each store of activations: tensors sent to the host, come back, and bytes sent."""
    compiled: Compilation | None = None
    operators: dict[str, int] = field(default_factory=dict)
    """Operators of each option that torch ran in the step where they are counted."""
    products: list[Product] = field(default_factory=list)
    """Of the first micro-batch of each step, how far each is from the definition."""
    tied: list[list[str]] = field(default_factory=list)
    collectives: dict[str, int] = field(default_factory=dict)
    reducing: list[int] = field(default_factory=list)
    """Micro-batches of the first step in whose backward gradients are summed over ranks."""
    axes: dict[str, int] = field(default_factory=dict)
    """With a mesh: collectives of the first step by kind and axis."""
    actions: list[tuple[str, int]] = field(default_factory=list)
    """With a pipeline: what this rank did with the micro-batches of the first step, in order."""
    exchanged: dict[str, int] = field(default_factory=dict)
    """With a pipeline: tensors that this rank exchanged with its neighbours in the first step, by what they are."""
    fault_reached: bool = False

    def save(self, folder: Path) -> None:
        save_plain(self, folder / f"rank{self.rank}.pt")


def share_rates(ranks: Sequence[RankTrace]) -> None:
    """Let the first rank have the learning rates of weights that only other stages of a pipeline train."""
    for number, step in enumerate(ranks[0].run.steps):
        for rank in ranks[1:]:
            if number < len(rank.run.steps):
                step.rates = rank.run.steps[number].rates | step.rates


def load_traces(folder: Path, world_size: int) -> list[RankTrace]:
    """The traces that the ranks of one case left; raises InputError where one cannot be read."""
    return [load_trace(folder, rank) for rank in range(world_size)]


def load_trace(folder: Path, rank: int) -> RankTrace:
    """The trace that one rank left; raises InputError."""
    return load_plain(folder / f"rank{rank}.pt", RankTrace)


def digest(tensor: torch.Tensor) -> str:
    """A fingerprint of a tensor's dtype, shape and bits."""
    data = tensor.detach().cpu().contiguous()
    head = f"{data.dtype}{tuple(data.shape)}".encode()
    return hashlib.blake2b(head + data.reshape(-1).view(torch.uint8).numpy().tobytes(), digest_size=12).hexdigest()


def plain(value: Any) -> Any:
    """A tensor of one element or a number, as a float."""
    return float(value.item()) if isinstance(value, torch.Tensor) else float(value)
