"""What activations take at least, from candidates that were traced: so that one that cannot fit is not traced."""

from __future__ import annotations

from dataclasses import dataclass, field

from toolkit.planning.candidate import Candidate
from toolkit.recipe.resolve import Resolved
from toolkit.rooms import host_settings
from toolkit.strategies import strategy_of

_RECOMPUTES = {"none": 0, "selective": 1, "full": 2}


@dataclass
class Floors:
    """Bytes of activations and loss that were alive at a candidate's peak, by recomputation and rows of a micro-batch.
    At the same place more rows, or less recomputation, have no less."""

    seen: list[tuple[Resolved, int]] = field(default_factory=list)

    def see(self, candidate: Candidate) -> None:
        """Note a candidate that was predicted."""
        breakdown = candidate.memory.breakdown
        if candidate.memory.peak_phase != "evaluate":
            self.seen.append((candidate.resolved, breakdown["activations"] + breakdown["loss"]))

    def of(self, resolved: Resolved) -> int:
        """The most that ``resolved`` is known to have alive at some place; 0 where nothing is known."""
        return max((live for other, live in self.seen if _at_least(resolved, other)), default=0)


def _at_least(resolved: Resolved, other: Resolved) -> bool:
    """Whether ``resolved`` has no less alive than ``other``: divided alike, with as many rows or more, no more of them
    recomputed, offloaded or in chunks, and computed alike or ``other`` in 16 bits throughout, which takes the least."""
    recipe, known = resolved.recipe, other.recipe
    alike = (
        _computes(other) in ("cast", _computes(resolved))
        and recipe.loss == known.loss
        and resolved.mesh.axes == other.mesh.axes
    )
    less = _RECOMPUTES[recipe.activation_checkpointing] <= _RECOMPUTES[known.activation_checkpointing]
    alike = alike and less and resolved.micro_size >= other.micro_size
    return alike and host_settings(recipe) == host_settings(known)


def _computes(resolved: Resolved) -> str:
    return strategy_of(resolved).memory_model().compute_as
