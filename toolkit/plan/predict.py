"""Memory of one way to train: the model's traces, made once, under a strategy's ledger."""

from __future__ import annotations

from dataclasses import dataclass, field

from toolkit.plan.memory import Memory, walk
from toolkit.plan.profile import Point, expand, interpolate
from toolkit.plan.skeleton import Skeleton, build
from toolkit.plan.trace import Segment, Shape, Traced, trace
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import CheckpointingName
from toolkit.strategies import strategy_of
from toolkit.strategies.ledgers.base import Compute


@dataclass
class Planner:
    """Predictions for one model, adapter, precision, length and device; strategies and sizes may differ.

    Traces are kept by checkpointing, micro-batch and way of computing; two of them give all larger micro-batches.
    """

    resolved: Resolved
    length: int
    skeleton: Skeleton
    traces: dict[Shape, Traced] = field(default_factory=dict)
    expanded: dict[tuple[CheckpointingName, int, Compute], list[Point]] = field(default_factory=dict)

    @classmethod
    def of(cls, resolved: Resolved, length: int) -> Planner:
        """Make the model's skeleton. Raises InputError where the model cannot be made from its config."""
        return cls(resolved, length, build(resolved))

    def memory(self, resolved: Resolved) -> Memory:
        """Peak memory of ``resolved``, a variant of this planner's recipe, on one device.

        Raises InputError where the model cannot be traced.
        """
        strategy = strategy_of(resolved)
        ledger = strategy.ledger_class()(self.skeleton.holdings, resolved)
        kind = resolved.recipe.activation_checkpointing
        return walk(self._points(kind, resolved.micro_size, ledger.compute_as), ledger, resolved.accumulation)

    def _points(self, kind: CheckpointingName, micro: int, compute: Compute) -> list[Point]:
        key = (kind, micro, self._same_as(compute))
        if key not in self.expanded:
            self.expanded[key] = list(expand(self.segments(kind, micro, compute), self.skeleton.holdings.order))
        return self.expanded[key]

    def segments(self, kind: CheckpointingName, micro: int, compute: Compute) -> list[Segment]:
        """The short model's segments at ``micro`` samples: traced, or put together from traces of two and four."""
        compute = self._same_as(compute)
        if micro in (1, 2, 4):
            return self._trace(kind, micro, compute).segments
        # One sample is a case of its own: its logits without the last position are a view, those of more a copy.
        one, two = self._trace(kind, 2, compute), self._trace(kind, 4, compute)
        try:
            return interpolate(one, two, micro)
        except ValueError:
            return self._trace(kind, micro, compute).segments

    def _same_as(self, compute: Compute) -> Compute:
        """Ways of computing that come to the same for this recipe share their traces."""
        frozen = self.skeleton.holdings.elements(False)
        if compute == "zero3" and not frozen:
            return "cast"
        if compute == "autocast" and not self.resolved.precision.mixed:
            return "cast"
        return compute

    def _trace(self, kind: CheckpointingName, micro: int, compute: Compute) -> Traced:
        shape = Shape(kind, micro, self.length, compute)
        if shape not in self.traces:
            recipe = self.resolved.recipe
            self.traces[shape] = trace(
                self.skeleton, shape, self.resolved.precision, self.resolved.device, recipe.model.task
            )
        return self.traces[shape]
