"""Memory of one candidate: the traces of the model, made once, with a strategy's memory model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from toolkit.data.spread import takes_one_row
from toolkit.model.loss_terms import chunk_rows
from toolkit.planning import cache, reuse
from toolkit.planning.contents import Contents
from toolkit.planning.images import Images
from toolkit.planning.loops import LOOPS, Loop, loop_named
from toolkit.planning.memory import Evaluation, Memory, walk, walk_evaluation
from toolkit.planning.profile import Point, evaluated, expand, held_bytes, interpolate, leaking
from toolkit.planning.segments import Segment, Shape, Traced
from toolkit.planning.stages import Stage, stages_of
from toolkit.recipe.resolve import Precision, Resolved
from toolkit.recipe.schema import CheckpointingName
from toolkit.rooms import asked_options, in_host
from toolkit.strategies import strategy_of
from toolkit.strategies.memory.base import BYTES, Compute, Holdings, MemoryModel
from toolkit.tasks import task_of
from toolkit.tasks.labels import Labels

if TYPE_CHECKING:
    from toolkit.planning.skeleton import Skeleton


@dataclass
class Model:
    """A recipe's model as ``loop`` trains it: its skeleton is built when the first trace wants it."""

    resolved: Resolved
    loop: Loop

    @cached_property
    def skeleton(self) -> Skeleton:
        """Raises InputError if the model cannot be built from its config."""
        from toolkit.planning.skeleton import build, build_as_is

        if self.loop.model is None:
            return build(self.resolved, self.loop.double_quant)
        trained = self.loop.trained(self.resolved)
        return build_as_is(trained, self.loop.model(trained))


@dataclass
class Planner:
    """Predictions for one model, adapter, precision, length, division of layers and device; strategies and sizes may
    differ.

    Traces are kept by checkpointing, micro-batch, way of computing and loss; two give all larger micro-batches.
    """

    resolved: Resolved
    length: int
    model: Model
    loop: Loop = LOOPS["toolkit"]
    images: Images | None = None
    traces: dict[Shape, Traced] = field(default_factory=dict)
    expanded: dict[tuple[Shape, bool], list[Point]] = field(default_factory=dict)
    divided: dict[tuple[object, ...], Planner] = field(default_factory=dict)
    """Of the same rows, by how many ranks divide the weights (``Mesh.weights``): each has its own skeleton."""

    def __post_init__(self) -> None:
        self._entry = cache.entry(self.resolved, self.length, self.loop, self.images)
        if self._entry is None or self._entry.contents is None:
            _ = self.contents  # a model that cannot be built is reported before anything is planned

    @classmethod
    def of(cls, resolved: Resolved, length: int, loop: str | Loop = "toolkit", images: Images | None = None) -> Planner:
        """Create the model's skeleton, or take a planner that is kept (toolkit/planning/reuse.py). ``images``: in each
        row; None: one, where the model sees.

        Raises InputError if the model cannot be built from its config.
        """
        found = loop_named(loop) if isinstance(loop, str) else loop
        images = images or Images.of(resolved, None, None)
        planner = reuse.kept(resolved, length, found, images)
        if planner is None:
            planner = cls(resolved, length, Model(resolved, found), found, images)
            reuse.add(planner)
        return planner

    def of_length(self, length: int) -> Planner:
        """One for rows of another length, or one that is kept."""
        planner = reuse.kept(self.resolved, length, self.loop, self.images)
        if planner is None:
            planner = Planner(self.resolved, length, self.model, self.loop, self.images)
            reuse.add(planner)
        return planner

    def for_layers_of(self, resolved: Resolved) -> Planner:
        """This one, or one whose layers and experts are divided as those of ``resolved``, a variant of this planner's
        recipe."""
        counts = resolved.mesh.weights
        if counts == self.resolved.mesh.weights:
            return self
        if counts not in self.divided:
            self.divided[counts] = Planner.of(resolved, self.length, self.loop, self.images)
        return self.divided[counts]

    def memory(self, resolved: Resolved) -> Memory:
        """Peak memory of ``resolved``, a variant of this planner's recipe, on one device.

        Raises InputError if the model cannot be traced.
        """
        if resolved.mesh.pipeline > 1:
            return max((memory for _, memory in self.by_stage(resolved)), key=lambda memory: memory.peak)
        strategy = strategy_of(resolved)
        resolved = self.loop.trained(resolved)
        held = strategy.memory_model()(self.holdings, resolved)
        held.wraps_layers = self.loop.wraps_layers
        shape, away = self._shape(resolved, held.compute_as), in_host(resolved.recipe)
        if (shape, away) not in self.expanded:
            self.expanded[shape, away] = list(expand(self._segments(shape), self.holdings.order, away))
        points: Iterable[Point] = self.expanded[shape, away]
        if self.loop.reentrant and held.leaks_inputs and shape.checkpointing == "full":
            points = leaking(points, self._segments(shape), self.holdings.order)
        memory = walk(points, held, resolved.accumulation)
        if (evaluation := self._evaluation(resolved, held)) is not None:
            rows = self.loop.eval_micro or resolved.micro_size
            shape = replace(shape, checkpointing="none", micro=rows, evaluates=True)
            walk_evaluation(memory, evaluated(self._segments(shape), self.holdings.order), held, evaluation)
        return memory

    def _evaluation(self, resolved: Resolved, held: MemoryModel) -> Evaluation | None:
        """What an evaluation has beside its forward; None where it takes less than a step: of as many rows as a
        micro-batch, at the weights that train, with nothing that stays."""
        averages = bool(resolved.recipe.eval_interval) and held.optimizer.averages
        rows, batches = self.loop.eval_micro, self.loop.eval_kept
        if not (averages or rows or batches):
            return None
        batch = self._logits(rows or resolved.micro_size)
        earlier = batch if self.loop.holds_outputs else 0
        if not batches:
            return Evaluation(earlier, averages=averages)
        everywhere = batch * resolved.world_size  # gathered from all ranks
        if not self.loop.concatenates:
            local = earlier if resolved.world_size > 1 else 0  # else the variable is the list's last
            return Evaluation(everywhere * (batches - 1) + local, everywhere * batches + local, averages)
        # transformers 5.23.0, trainer_pt_utils.py, ``EvalLoopContainer``: the tensor of all batches before, the new one
        # of all, and the last batch, which is also a variable of the loop while the next forward runs.
        earlier = everywhere if batches > 2 else 0  # of one batch the variable is the container's own
        joined = 2 * batches if batches > 1 else 1
        return Evaluation(everywhere * (batches - 1) + earlier, everywhere * joined, averages)

    def _logits(self, rows: int) -> int:
        """Bytes of the logits of ``rows`` rows, as the loop's model returns them: accelerate copies those of mixed
        precision to float32. 0 where labels are not tokens of the row."""
        if task_of(self.resolved.recipe.model.task).labels is not Labels.NEXT:
            return 0
        precision = self.precision
        size = 4 if precision.mixed and self.loop.float32_outputs else BYTES[precision.compute]
        return rows * self.length * self.contents.vocabulary * size

    def by_stage(self, resolved: Resolved) -> list[tuple[Stage, Memory]]:
        """The pipeline stages of ``resolved``, first to last, with the memory of a device of each; [] without
        ``strategy.mesh.pipeline``."""
        if resolved.mesh.pipeline == 1:
            return []
        segments = self.segments_of(resolved)
        return [(one, one.memory(segments, resolved)) for one in stages_of(resolved, self.holdings, self.length)]

    def holdings_of(self, resolved: Resolved) -> list[Holdings]:
        """The weights of the whole model, or those of each pipeline stage."""
        if resolved.mesh.pipeline == 1:
            return [self.holdings]
        return [one.holdings for one in stages_of(resolved, self.holdings, self.length)]

    def held(self, resolved: Resolved) -> int:
        """Bytes that blocks hold from their forward to their backward, wherever these are."""
        return held_bytes(self.segments_of(resolved), self.holdings.order)

    def away(self, resolved: Resolved) -> int:
        """Bytes of activations that wait in host memory, for one device."""
        return self.held(resolved) if in_host(resolved.recipe) else 0

    def segments_of(self, resolved: Resolved) -> list[Segment]:
        """The short model's segments under ``resolved``, a variant of this planner's recipe."""
        return self._segments(self._shape(resolved, strategy_of(resolved).memory_model().compute_as))

    def segments(self, kind: CheckpointingName, micro: int, compute: Compute) -> list[Segment]:
        """The short model's segments at ``micro`` samples, with the loss of this planner's recipe."""
        shape = self._shape(self.resolved, compute)
        return self._segments(replace(shape, checkpointing=kind, micro=micro))

    @property
    def precision(self) -> Precision:
        """The dtypes of the loop that is planned for."""
        return self.loop.precision(self.resolved)

    def notes(self) -> list[str]:
        """What each row contains, in words, where that is more than tokens."""
        if self.images is None:
            return []
        if self._entry is None or self._entry.notes is None:
            config = self.skeleton.config.to_dict()
            notes = [self.images.describe(config, self.resolved.recipe.model.task, self.length)]
            if self._entry is None:
                return notes
            self._entry.add_notes(notes)
        assert self._entry.notes is not None
        return self._entry.notes

    @property
    def skeleton(self) -> Skeleton:
        """The short model that is traced; built if it is not there yet."""
        return self.model.skeleton

    @cached_property
    def contents(self) -> Contents:
        """The model's weights and sizes, from disk where they are kept."""
        if self._entry is None:
            return self.skeleton.contents()
        if self._entry.contents is None:
            self._entry.describe(self.skeleton.contents())
        assert self._entry.contents is not None
        return self._entry.contents

    @property
    def holdings(self) -> Holdings:
        """The weights of the whole model."""
        return self.contents.holdings

    @property
    def slowly(self) -> list[str]:
        """Why traces used fake tensors, if they did (see toolkit/planning/trace.py)."""
        return sorted({traced.slowly for traced in self.traces.values() if traced.slowly})

    def _shape(self, resolved: Resolved, compute: Compute) -> Shape:
        recipe = resolved.recipe
        return Shape(
            recipe.activation_checkpointing,
            resolved.micro_size,
            self.length,
            self._same_as(compute),
            fused=recipe.loss == "fused",
            masked=masks_rows(resolved),
            loop=self.loop,
            images=self.images,
            parts=resolved.mesh.context,
        )

    def _segments(self, shape: Shape) -> list[Segment]:
        """Traced, or assembled from traces of two smaller sizes."""
        small = self._smallest(shape)
        if shape.micro <= small or shape.micro == 2 * small:
            return self._trace(shape).segments
        one, two = self._trace(replace(shape, micro=small)), self._trace(replace(shape, micro=2 * small))
        try:
            return interpolate(one, two, shape.micro)
        except ValueError:
            return self._trace(shape).segments

    def _smallest(self, shape: Shape) -> int:
        """The smaller of two sizes from which memory grows in proportion. One sample is a case of its own: its logits
        without the last position are a view, those of more a copy. The fused loss's chunks stop growing where there
        are two whole ones."""
        small = 2
        if shape.fused:
            two_chunks = 2 * chunk_rows(self.resolved.device, self.contents.vocabulary)
            while small * (shape.length // shape.parts - 1) < two_chunks and small < shape.micro:
                small *= 2
        return small

    def _same_as(self, compute: Compute) -> Compute:
        """Ways of computing that come to the same for this recipe share their traces."""
        frozen = self.holdings.elements(False)
        if compute == "deepspeed-linear" and not frozen:
            return "cast"
        precision = self.precision
        if compute == "autocast" and not precision.mixed and precision.compute == precision.trainable:
            return "cast"
        return compute

    def _trace(self, shape: Shape) -> Traced:
        if shape not in self.traces:
            kept = None if self._entry is None else self._entry.trace(shape)
            self.traces[shape] = kept or self._run(shape)
        return self.traces[shape]

    def _run(self, shape: Shape) -> Traced:
        from toolkit.planning.trace import trace

        traced = trace(self.skeleton, shape, self.precision, self.resolved.device, self.resolved.recipe.model.task)
        if self._entry is not None:
            self._entry.add(traced)
        return traced


def masks_rows(resolved: Resolved) -> bool:
    """Whether packed samples are kept apart by a mask of each row's square. Flash attention takes lengths; flex
    attention a table of blocks, a 16,384th of that."""
    recipe = resolved.recipe
    attention = recipe.model.attention
    unmasked = takes_one_row(attention) or attention == "flex_attention"
    return recipe.data.packing and not unmasked and not any(one.option.unmasked for one in asked_options(recipe))
