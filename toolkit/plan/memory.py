"""Peak memory of a step on one device: activations of the traced model and what the strategy keeps, walked through
phase by phase. The peak is the maximum over the places of the step, never a sum of terms' own maxima."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from toolkit.plan.profile import Point
from toolkit.strategies.ledgers.base import TAIL, Ledger

PHASES = ("load", "forward", "loss", "backward", "reduce", "step", "save")


TERMS = ("parameters", "gradients", "optimizer", "activations", "loss", "communication")


@dataclass(frozen=True)
class Place:
    """A moment of the step: its phase, and the bytes alive by term."""

    phase: str
    terms: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.terms.values())


@dataclass
class Memory:
    """``phases``: the highest bytes of each; ``breakdown``: the terms at the highest of all; ``line``: one step,
    place by place, without loading and saving."""

    phases: dict[str, int] = field(default_factory=dict)
    breakdown: dict[str, int] = field(default_factory=dict)
    peak: int = 0
    peak_phase: str = ""
    line: list[Place] = field(default_factory=list)

    def see(self, phase: str, terms: dict[str, int]) -> None:
        total = sum(terms.values())
        self.phases[phase] = max(self.phases.get(phase, 0), total)
        if phase not in ("load", "save"):
            self.line.append(Place(phase, terms))
        if total > self.peak:
            self.peak, self.peak_phase, self.breakdown = total, phase, terms


def walk(points: Iterable[Point], ledger: Ledger, accumulation: int) -> Memory:
    """The memory of loading, of a window's last micro-batch and its optimizer step, when every buffer and moment is
    there, and of saving."""
    memory = Memory()
    nothing = dict.fromkeys(TERMS, 0)
    if ledger.overlap:
        # On a CPU the device is the host, where every process loads the whole model: Candidate.host_loading.
        memory.see("load", nothing | {"parameters": ledger.loading()})
    ledger.start(accumulating=accumulation > 1)
    for point in points:
        moment = 0
        ledger.pass_on()
        if point.event == "enter":
            moment = ledger.enter(point.block, point.backward)
        elif point.event == "leave":
            ledger.leave(point.block, point.backward)
            continue
        elif point.event == "gradient":
            moment = ledger.gradient(ledger.holdings.by_name[point.weight], point.block)
        phase = "backward" if point.backward else "loss" if point.block == TAIL else "forward"
        if point.event == "gradient":
            phase = "reduce" if moment else phase
        memory.see(phase, _terms(ledger, point.live - point.loss, point.loss, moment))
    ledger.pass_on()
    moment = ledger.finish_backward()
    memory.see("reduce", _terms(ledger, 0, 0, moment))
    memory.see("step", _terms(ledger, 0, 0, ledger.step()))
    memory.see(
        "save", nothing | ledger.resident | {"communication": ledger.resident["communication"] + ledger.saving()}
    )
    return memory


def _terms(ledger: Ledger, activations: int, loss: int, moment: int) -> dict[str, int]:
    resident = ledger.resident
    return {
        "parameters": resident["parameters"] + ledger.gathered,
        "gradients": resident["gradients"] + ledger.gradients,
        "optimizer": resident["optimizer"],
        "activations": activations,
        "loss": loss,
        "communication": resident["communication"] + ledger.buffers + moment,
    }
