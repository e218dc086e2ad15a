"""A traced step as numbers that any micro-batch size and any number of blocks can be put into.

Every byte count of a trace is a constant (casts of weights, rotary tables) plus a part per sample, so two traces
give all larger sizes (a peak to a part in a thousand: at another size another place may be the highest). Blocks of
a kind save the same, so the live bytes at a place in the whole model are those of the short model at that place,
with what the missing blocks hold added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from toolkit.planning.segments import OUTSIDE, Gradient, Segment, Traced
from toolkit.strategies.memory.base import EMBED, TAIL


@dataclass(frozen=True)
class Point:
    """A place in one micro-batch's forward and backward, in the order of time.

    ``block``: which of the whole model's, or EMBED, TAIL. ``event``: ``enter``,
    ``high`` (the highest in between), ``gradient`` (of ``weight``, complete), ``leave``. ``live``: bytes alive
    that the trace knows: activations and their gradients, workspace, and the gradient of one weight until it is
    complete. ``loss``: of these, what neither a block nor its neighbours hold (logits and loss)."""

    block: int
    backward: bool
    event: str
    live: int
    loss: int = 0
    weight: str = ""


def interpolate(one: Traced, two: Traced, micro: int) -> list[Segment]:
    """The segments at ``micro`` samples: bytes and floating point operations on the straight line through two traces.

    ``one`` and ``two`` must have different micro-batch sizes. Raises ValueError if they differ in more than sizes.
    """
    if [_outline(s) for s in one.segments] != [_outline(s) for s in two.segments]:
        raise ValueError("the model's operations depend on the number of samples")
    base = one.shape.micro
    steps = (micro - base) / (two.shape.micro - base)

    def at(a: int, b: int) -> int:
        return round(a + (b - a) * steps)

    return [_blend(a, b, at, steps) for a, b in zip(one.segments, two.segments, strict=True)]


def _blend(a: Segment, b: Segment, at: Callable[[int, int], int], steps: float) -> Segment:
    held = {key: at(a.held.get(key, 0), b.held.get(key, 0)) for key in a.held.keys() | b.held.keys()}
    gradients = [
        Gradient(x.weight, at(x.live, y.live), at(x.peak, y.peak))
        for x, y in zip(a.gradients, b.gradients, strict=True)
    ]
    return Segment(
        a.block, a.backward, at(a.start, b.start), at(a.peak, b.peak), held, at(a.flops, b.flops),
        a.work.toward(b.work, steps), at(a.exchanged, b.exchanged), a.exchanges,
        at(a.summed, b.summed), a.sums, gradients,
    )  # fmt: skip


def _outline(segment: Segment) -> tuple[int, bool, int]:
    return segment.block, segment.backward, len(segment.gradients)


@dataclass(frozen=True)
class Ends:
    """What a pipeline stage has beside blocks. ``first``: the embedding; ``last``: final norm, head and loss.
    ``shared``: bytes of the head's part of a tied weight's gradient, if embedding and head are on different stages; a
    trace keeps it until the embedding's backward. ``weight``: the name of that weight."""

    first: bool = True
    last: bool = True
    shared: int = 0
    weight: str = ""


WHOLE = Ends()


def expand(segments: list[Segment], order: Sequence[int], away: bool = False, ends: Ends = WHOLE) -> Iterator[Point]:
    """Every place of one micro-batch's forward and backward in the whole model, from the short model's segments.

    ``order``: the kind of each block, first to last. A short model's block stands for all of its kind. ``ends``: of a
    pipeline stage.
    ``away``: what blocks hold is in host memory (toolkit/rooms.py: ``in_host``), but for the one that is on its way:
    there to the end of the forward, and back beside the one whose backward it is.
    """
    forward = {s.block: s for s in segments if not s.backward and s.block != OUTSIDE}
    backward = {s.block: s for s in segments if s.backward and s.block != OUTSIDE}
    outside = [s for s in segments if s.block == OUTSIDE]
    first, tail = outside[0], [s for s in outside if not s.backward][-1]
    heads = [s for s in outside if s.backward]
    opening, closing = heads[0], heads[1:]

    def holding(held: dict[int, int], done: int, near: int) -> int:
        """Bytes on the device of what the first ``done`` blocks hold; ``near``: of how many, where they are away."""
        return sum(held.get(kind, 0) for kind in order[max(0, done - near) if away else 0 : done])

    def missing(held: dict[int, int]) -> int:
        """... of all blocks, beyond what the short model's hold."""
        return holding(held, len(order), 1) - inside(held)

    def inside(held: dict[int, int]) -> int:
        return sum(size for block, size in held.items() if block != OUTSIDE)

    if ends.first:
        yield Point(EMBED, False, "enter", first.start)
        yield Point(EMBED, False, "high", first.peak)
        yield Point(EMBED, False, "leave", first.peak)
    final = tail.held
    for block, kind in enumerate(order):
        segment = forward[kind]
        base = segment.start - inside(segment.held) + holding(final, block, 0)
        yield Point(block, False, "enter", base)
        yield Point(block, False, "high", base + segment.peak - segment.start)
        yield Point(block, False, "leave", base + final.get(kind, 0))
    shift, saved = missing(tail.held), opening.held
    if ends.last:
        yield Point(TAIL, False, "enter", tail.start + shift)
        yield Point(TAIL, False, "high", tail.peak + shift, loss=tail.peak - inside(tail.held))
        yield Point(TAIL, False, "leave", opening.start + shift)
        *before, left = _backward_points(opening, TAIL, missing(saved))
        yield from before
        if ends.shared and not ends.first:
            yield Point(TAIL, True, "gradient", left.live, left.loss, ends.weight)
        yield left
    for block in range(len(order) - 1, -1, -1):
        kind = order[block]
        if kind not in backward:
            continue  # nothing here or before it trains
        segment = backward[kind]
        base = flowing(segment) - ends.shared + holding(saved, block + 1, 2)
        yield from _backward_points(segment, block, base - segment.start)
    if not ends.first:
        return
    if closing:
        for segment in closing:
            yield from _backward_points(segment, EMBED, -ends.shared)
    else:
        yield Point(EMBED, True, "enter", 0)
        yield Point(EMBED, True, "leave", 0)


def flowing(segment: Segment) -> int:
    """Bytes alive at the start of a block's backward, without what this block and earlier ones saved: gradients of
    hidden states, and what was saved outside of blocks. Kinds are numbered in their order in the short model."""
    return segment.start - sum(size for kind, size in segment.held.items() if 0 <= kind <= segment.block)


def kept_in_flight(segments: list[Segment], order: Sequence[int], hidden: int, shared: int = 0) -> int:
    """Bytes of a micro-batch in flight: what a stage of these blocks keeps between its forward and its backward.
    ``hidden``: bytes of its hidden states."""
    backward = {s.block: s for s in segments if s.backward and s.block != OUTSIDE}
    last = backward.get(order[-1])
    outside = 0 if last is None else max(0, flowing(last) - hidden - shared)
    return held_bytes(segments, order) + outside


def leaking(points: Iterable[Point], segments: list[Segment], order: Sequence[int]) -> Iterator[Point]:
    """Points of a backward in which every block's input and its gradient stay until the backward ends, as FSDP1 keeps
    those of frozen weights under reentrant checkpointing (toolkit/strategies/memory/fsdp.py). The gradient that a block
    is given is the one of the input after it, which is counted already."""
    held = next(s for s in segments if s.block == OUTSIDE and s.backward).held
    sizes = [held.get(kind, 0) for kind in order]
    for point in points:
        done = sizes[max(point.block, -1) + 1 :] if point.backward and point.block != TAIL else []
        yield replace(point, live=point.live + sum(done) + sum(done[1:])) if done else point


def held_bytes(segments: list[Segment], order: Sequence[int]) -> int:
    """Bytes that all blocks hold from their forward to their backward. ``order``: the kind of each block."""
    held = next(s for s in segments if s.block == OUTSIDE and s.backward).held
    return sum(held.get(kind, 0) for kind in order)


def evaluated(segments: list[Segment], order: Sequence[int]) -> Iterator[Point]:
    """Every place of a forward without gradients (``Shape.evaluates``) in the whole model: a block holds nothing for a
    backward, but autocast keeps the casts of its weights until the forward's end."""
    forward = {s.block: s for s in segments if s.block != OUTSIDE}
    outside = [s for s in segments if s.block == OUTSIDE]
    first, tail = outside[0], outside[-1]

    def inside(held: dict[int, int]) -> int:
        return sum(size for block, size in held.items() if block != OUTSIDE)

    yield Point(EMBED, False, "enter", first.start)
    yield Point(EMBED, False, "high", first.peak)
    yield Point(EMBED, False, "leave", first.peak)
    kept = 0
    for block, kind in enumerate(order):
        segment = forward[kind]
        base = segment.start - inside(segment.held) + segment.held.get(kind, 0) + kept
        yield Point(block, False, "enter", base)
        yield Point(block, False, "high", base + segment.peak - segment.start)
        yield Point(block, False, "leave", base)
        kept += tail.held.get(kind, 0)
    shift = kept - inside(tail.held)
    yield Point(TAIL, False, "enter", tail.start + shift)
    yield Point(TAIL, False, "high", tail.peak + shift, loss=tail.peak - inside(tail.held))
    yield Point(TAIL, False, "leave", tail.start + shift)


def _backward_points(segment: Segment, block: int, shift: int) -> Iterator[Point]:
    held = sum(size for owner, size in segment.held.items() if owner != OUTSIDE)

    def loss(live: int) -> int:
        return max(0, live - held) if block < 0 else 0

    yield Point(block, True, "enter", segment.start + shift, loss(segment.start))
    for gradient in segment.gradients:
        yield Point(block, True, "high", gradient.peak + shift, loss(gradient.peak))
        yield Point(block, True, "gradient", gradient.live + shift, loss(gradient.live), gradient.weight)
    yield Point(block, True, "high", segment.peak + shift, loss(segment.peak))
    yield Point(block, True, "leave", segment.peak + shift)
