"""Pipeline stages (``strategy.mesh.pipeline``) in a plan: their weights, the activations of micro-batches in flight,
and the length of a step under the 1F1B schedule. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from toolkit.planning.memory import Memory, walk
from toolkit.planning.profile import Ends, expand, kept_in_flight
from toolkit.planning.segments import OUTSIDE, Segment
from toolkit.recipe.mesh import one_forward_one_backward, stage_blocks
from toolkit.recipe.resolve import Resolved
from toolkit.strategies import strategy_of
from toolkit.strategies.memory.base import BYTES, Holdings, MemoryModel


@dataclass(frozen=True)
class Stage:
    """Stage ``index`` (from 0) of ``count``: its ``blocks``, and the weights of its ranks."""

    index: int
    count: int
    blocks: range
    holdings: Holdings
    hidden: int
    """Bytes of a micro-batch's hidden states, which are sent from stage to stage."""
    ends: Ends

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.count - 1

    def segments(self, segments: list[Segment]) -> list[Segment]:
        """Those of the short model that this stage computes."""
        outside = [s for s in segments if s.block == OUTSIDE]
        tail = [s for s in outside if not s.backward][-1]
        opening = next(s for s in outside if s.backward)
        others = [s for s in outside if s is not tail and s is not opening]
        left_out = (others if not self.first else []) + ([tail, opening] if not self.last else [])
        return [s for s in segments if not any(s is other for other in left_out)]

    def memory(self, segments: list[Segment], resolved: Resolved) -> Memory:
        """Peak memory of a step, with the largest number of micro-batches in flight."""
        order, micros = self.holdings.order, resolved.accumulation
        ahead = self.count - 1 - self.index
        # A trace counts the embedding's output outside of the blocks, and every later block's input as the block's own.
        # Later stages have no embedding output; all but the last keep the hidden states that they have sent.
        spare = self.hidden * ((not self.last) - (not self.first))
        kept = 0 if self.last else kept_in_flight(segments, order, self.hidden, self.ends.shared) + spare
        # The gradient of received hidden states is kept until the previous stage has received it.
        sent = self.hidden if not self.first and micros > 1 else 0
        if micros > ahead + 1:
            situations = [(ahead, True)]
        else:  # the first backward runs after all forwards, and no gradients exist yet
            situations = [(micros - 1, False), *([(micros - 2, True)] if micros > 1 else [])]
        found = Memory()
        for others, accumulating in situations:
            points = expand(segments, order, ends=self.ends)
            beside = others * kept + sent
            shifted = (
                replace(point, live=point.live + beside + (spare if point.backward or self.last else 0))
                for point in points
            )
            found = found.joined(walk(shifted, self.held(resolved), 2 if accumulating else 1))
        return found

    def held(self, resolved: Resolved) -> MemoryModel:
        """The memory model of its ranks."""
        return strategy_of(resolved).memory_model()(self.holdings, resolved)

    def sent(self, micros: int) -> int:
        """Bytes that one of its ranks sends to neighbouring stages in a step."""
        return micros * self.hidden * ((not self.first) + (not self.last))


def stages_of(resolved: Resolved, holdings: Holdings, length: int) -> list[Stage]:
    """The stages of a recipe, first to last. ``holdings``: of the whole model; ``length``: tokens of a row."""
    count = resolved.mesh.pipeline
    shared = holdings.tied and count > 1
    embedding = holdings.embed[0]
    kept = BYTES[resolved.precision.trainable if embedding.trains else resolved.precision.frozen]
    computed = BYTES[resolved.precision.compute]
    # Under autocast the residual stream has the dtype of the embedding's weight.
    width = kept if resolved.traits.autocast else computed
    hidden = resolved.micro_size * length * embedding.shape[1] * width
    gradient = embedding.numel * width if shared and embedding.trains else 0
    found = []
    for index, blocks in enumerate(stage_blocks(len(holdings.order), count)):
        first, last = index == 0, index == count - 1
        own = replace(
            holdings,
            order=[holdings.order[block] for block in blocks],
            embed=holdings.embed if first else [],
            tail=[*(holdings.tail if last else []), *(holdings.embed if last and shared else [])],
            tied=holdings.tied and not shared,
        )
        found.append(Stage(index, count, blocks, own, hidden, Ends(first, last, gradient, embedding.name)))
    return found


def step_length(forwards: Sequence[float], backwards: Sequence[float], hop: float, micros: int) -> float:
    """Seconds from the first forward of a step to its last backward.

    ``forwards``, ``backwards``: of a micro-batch, by stage; ``hop``: from a stage to its neighbour. Each stage takes
    its turn as soon as what it needs is there."""
    count = len(forwards)
    turns: list[Iterator[tuple[str, int]]] = [iter(one_forward_one_backward(s, count, micros)) for s in range(count)]
    waiting = [next(turn, None) for turn in turns]
    free = [0.0] * count
    done: dict[tuple[str, int, int], float] = {}
    while any(one is not None for one in waiting):
        for stage in range(count):
            while (turn := waiting[stage]) is not None:
                what, micro = turn
                before = stage - 1 if what == "forward" else stage + 1
                needed = done.get((what, micro, before)) if 0 <= before < count else -hop
                if needed is None:
                    break
                took = forwards[stage] if what == "forward" else backwards[stage]
                free[stage] = max(free[stage], needed + hop) + took
                done[what, micro, stage] = free[stage]
                waiting[stage] = next(turns[stage], None)
    return max(free)
