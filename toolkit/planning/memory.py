"""Peak memory of a step on one device: activations of the traced model plus the strategy's state, phase by phase.

The peak is the maximum over the points of the step, never a sum of the terms' maxima.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from toolkit.planning.profile import Point
from toolkit.strategies.memory.base import TAIL, MemoryModel

PHASES = ("load", "forward", "loss", "backward", "reduce", "step", "evaluate", "save")


_BESIDE_THE_STEP = ("load", "evaluate", "save")
TERMS = ("parameters", "gradients", "optimizer", "activations", "loss", "communication")


Terms = tuple[int, int, int, int, int, int]
"""Bytes by term, in the order of TERMS."""


class Place(NamedTuple):
    """A moment of the step: its phase, and the bytes alive."""

    phase: str
    total: int
    bytes: Terms

    @property
    def terms(self) -> dict[str, int]:
        """The bytes by term."""
        return dict(zip(TERMS, self.bytes, strict=True))


@dataclass
class Memory:
    """``phases``: the highest bytes of each; ``breakdown``: the terms at the highest of all; ``line``: one step,
    place by place, without loading and saving. ``stays``: bytes of weights and moments, for the whole step. ``held``:
    those and the gradients, which the update finds."""

    phases: dict[str, int] = field(default_factory=dict)
    breakdown: dict[str, int] = field(default_factory=dict)
    peak: int = 0
    peak_phase: str = ""
    stays: int = 0
    held: int = 0
    line: list[Place] = field(default_factory=list)

    def see(self, phase: str, terms: Terms) -> None:
        total = sum(terms)
        if total > self.phases.get(phase, -1):
            self.phases[phase] = total
        if phase not in _BESIDE_THE_STEP:
            self.line.append(Place(phase, total, terms))
        if total > self.peak:
            self.peak, self.peak_phase = total, phase
            self.breakdown = dict(zip(TERMS, terms, strict=True))

    def joined(self, other: Memory) -> Memory:
        """The higher of two places in a step, phase by phase; ``line`` is that of the higher one."""
        higher, lower = (self, other) if self.peak > other.peak else (other, self)
        phases = {name: max(higher.phases.get(name, 0), lower.phases.get(name, 0)) for name in
                  [*higher.phases, *lower.phases]}  # fmt: skip
        return replace(higher, phases=phases)


def walk(points: Iterable[Point], held: MemoryModel, accumulation: int) -> Memory:
    """The memory of loading, of a window's last micro-batch and its optimizer step, when every buffer and moment is
    there, and of saving."""
    memory = Memory(stays=sum(held.resident.values()))
    if held.overlap:
        # On a CPU the device is the host, where every process loads the whole model: Candidate.host_loading.
        memory.see("load", (held.loading(), 0, 0, 0, 0, 0))
    held.start(accumulating=accumulation > 1)
    for point in points:
        moment = 0
        held.pass_on()
        if point.event == "enter":
            moment = held.enter(point.block, point.backward)
        elif point.event == "leave":
            held.leave(point.block, point.backward)
            continue
        elif point.event == "high":
            moment = held.fetched
        elif point.event == "gradient":
            moment = held.gradient(held.holdings.by_name[point.weight], point.block)
        phase = "backward" if point.backward else "loss" if point.block == TAIL else "forward"
        if point.event == "gradient":
            phase = "reduce" if moment else phase
        memory.see(phase, _terms(held, point.live - point.loss, point.loss, moment))
    held.pass_on()
    moment = held.finish_backward()
    memory.see("reduce", _terms(held, 0, 0, moment))
    memory.held = memory.stays + held.gradients
    memory.see("step", _terms(held, 0, 0, held.step()))
    stays = held.resident
    copied = stays["communication"] + held.saving()
    memory.see("save", (stays["parameters"], stays["gradients"], stays["optimizer"], 0, 0, copied))
    return memory


@dataclass(frozen=True)
class Evaluation:
    """Bytes that an evaluation has beside one forward. ``held``: logits of earlier batches, while the forward of the
    last one runs; ``joined``: of all batches, after it, where they become one tensor; ``averages``: whether it is at
    the optimizer's average, beside which this rank's weights are kept."""

    held: int = 0
    joined: int = 0
    averages: bool = False


def walk_evaluation(memory: Memory, points: Iterable[Point], held: MemoryModel, evaluation: Evaluation) -> None:
    """Add the last batch of an evaluation, at ``points`` of a forward without gradients."""
    kept, moment = held.evaluating() if evaluation.averages else (0, 0)
    held.start(accumulating=False)
    held.resident["parameters"] += kept
    memory.see("evaluate", _terms(held, 0, 0, moment))
    for point in points:
        if point.event == "leave":
            held.leave(point.block, False)
            continue
        now = held.enter(point.block, False) if point.event == "enter" else held.fetched
        memory.see("evaluate", _terms(held, point.live - point.loss, point.loss + evaluation.held, now))
    memory.see("evaluate", _terms(held, 0, evaluation.joined, 0))


def _terms(held: MemoryModel, activations: int, loss: int, moment: int) -> Terms:
    resident = held.resident
    return (
        resident["parameters"] + held.gathered,
        resident["gradients"] + held.gradients,
        resident["optimizer"],
        activations,
        loss,
        resident["communication"] + held.buffers + moment,
    )
