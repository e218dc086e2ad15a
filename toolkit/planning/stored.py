"""A model's contents and traces as JSON, and back without a change: all numbers are integers and floats, which JSON
keeps to the last bit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from toolkit.planning.contents import Contents
from toolkit.planning.segments import Gradient, Segment, Shape, Traced
from toolkit.planning.work import NUMBERS, Attention, Work
from toolkit.strategies.memory.base import Holdings, Weight

_WEIGHT = tuple(field.name for field in fields(Weight))
_PLAIN = ("block", "backward", "start", "peak", "flops", "exchanged", "exchanges", "summed", "sums")
"""Fields of a segment that are numbers."""


def contents_to(contents: Contents) -> dict[str, Any]:
    """Contents as JSON. A weight is written once, and named where it is part of a unit."""
    holdings = contents.holdings
    return {
        "weights": [[getattr(weight, name) for name in _WEIGHT] for weight in holdings.by_name.values()],
        "kinds": [_names(kind) for kind in holdings.kinds],
        "order": list(holdings.order),
        "embed": _names(holdings.embed),
        "tail": _names(holdings.tail),
        "tied": holdings.tied,
        "buffers": holdings.buffers,
        "vocabulary": contents.vocabulary,
    }


def contents_from(found: dict[str, Any]) -> Contents:
    """The contents that `contents_to` has written."""
    by_name = {}
    for values in found["weights"]:
        given = dict(zip(_WEIGHT, values, strict=True))
        by_name[given["name"]] = Weight(**given | {"shape": tuple(given["shape"])})

    def weights(names: list[str]) -> list[Weight]:
        return [by_name[name] for name in names]

    kinds, embed, tail = [weights(kind) for kind in found["kinds"]], weights(found["embed"]), weights(found["tail"])
    holdings = Holdings(kinds, found["order"], embed, tail, found["tied"], found["buffers"], by_name)
    return Contents(holdings, found["vocabulary"])


def shape_name(shape: Shape) -> str:
    """What tells the traces of one entry apart. Loop and images are in the entry's key."""
    own = (shape.checkpointing, shape.micro, shape.length, shape.compute, shape.fused, shape.masked, shape.parts)
    return json.dumps([*own, shape.evaluates])


def trace_to(traced: Traced) -> dict[str, Any]:
    """A trace as JSON, without its shape."""
    return {
        "segments": [_segment_to(segment) for segment in traced.segments],
        "attention": list(traced.attention),
        "slowly": traced.slowly,
    }


def trace_from(found: dict[str, Any], shape: Shape) -> Traced:
    """The trace of ``shape`` that `trace_to` has written."""
    segments = [_segment_from(segment) for segment in found["segments"]]
    return Traced(shape, segments, tuple(found["attention"]), found["slowly"])


def _segment_to(segment: Segment) -> list[Any]:
    return [
        [getattr(segment, name) for name in _PLAIN],
        [[owner, size] for owner, size in segment.held.items()],
        [getattr(segment.work, name) for name in NUMBERS],
        [[*kernel, count] for kernel, count in segment.work.attention.items()],
        [[gradient.weight, gradient.live, gradient.peak] for gradient in segment.gradients],
    ]


def _segment_from(found: list[Any]) -> Segment:
    plain, held, work, attention, gradients = found
    return Segment(
        **dict(zip(_PLAIN, plain, strict=True)),
        held=dict(held),
        work=Work(
            **dict(zip(NUMBERS, work, strict=True)),
            attention={Attention(*kernel): count for *kernel, count in attention},
        ),
        gradients=[Gradient(*one) for one in gradients],
    )


def _names(weights: Sequence[Weight]) -> list[str]:
    return [weight.name for weight in weights]
