"""A recipe with every derived value and its reason (``derive.py`` derives them); no value is left at "auto"."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

from toolkit.base_formats import BaseFormat
from toolkit.recipe.mesh import Mesh, RowPart
from toolkit.recipe.model_facts import ModelFacts
from toolkit.recipe.rates import rate_factor
from toolkit.recipe.schema import PrecisionName, Recipe
from toolkit.recipe.traits import Traits
from toolkit.rooms import asked_whole


@dataclass(frozen=True)
class Decision:
    """One derived value and its reason."""

    key: str
    value: Any
    reason: str


@dataclass(frozen=True)
class Precision:
    """Dtypes by torch's names. ``compute``: matrix products; ``trainable``: the weights that the optimizer
    updates, its moments and the accumulated gradient; ``frozen``: weights that do not train."""

    compute: str
    trainable: str
    frozen: str
    loss_scaling: bool = False

    @property
    def mixed(self) -> bool:
        """Whether matrix products use another dtype than the trained weights."""
        return self.compute != self.trainable

    @property
    def everywhere(self) -> bool:
        """Whether a strategy that casts weights to ``compute`` runs autocast too."""
        return False

    @property
    def vectors(self) -> str:
        """The dtype of frozen weights of one dimension, as norms have."""
        return self.frozen

    @property
    def unpacked(self) -> str:
        """The dtype that 4-bit weights are unpacked in."""
        return self.frozen


PRECISIONS: dict[PrecisionName, Precision] = {
    "fp32": Precision("float32", "float32", "float32"),
    "bf16": Precision("bfloat16", "float32", "bfloat16"),
    "fp16": Precision("float16", "float32", "float16", loss_scaling=True),
    "bf16-pure": Precision("bfloat16", "bfloat16", "bfloat16"),
}


@dataclass
class Decisions:
    """Collects decisions while a recipe is resolved."""

    made: list[Decision] = field(default_factory=list)

    def __call__(self, key: str, value: Any, reason: str) -> Any:
        """Record one decision and return its value."""
        self.made.append(Decision(key, value, reason))
        return value


@dataclass(frozen=True)
class Resolved:
    """A recipe with all derived values. Launch files and runs use only this."""

    recipe: Recipe
    source: str
    sha256: str
    facts: ModelFacts
    device: str
    traits: Traits
    """Traits of the strategy."""
    world_size: int
    """Processes, over all nodes."""
    data_size: int
    """Data-parallel size: the number of parts that a window's samples are divided into; a divisor of ``world_size``.
    Consecutive ranks have the same part, and the stages of a pipeline."""
    mesh: Mesh
    """The strategy's own where the recipe has none: one group of all processes, sharded or replicated."""
    micro_size: int
    accumulation: int
    global_size: int
    precision: Precision
    max_grad_norm: float
    blocks: tuple[str, ...]
    warmup_steps: int | None
    """None: a fraction of a number of steps that depends on the data (``run.epochs``)."""
    settings: Any = None
    """The strategy's own values, see its file under toolkit/strategies/."""
    decisions: tuple[Decision, ...] = ()
    loss_kernel: str = "plain"
    """Implementation of ``loss: fused``: «chunked», the toolkit's own, or «liger»; «plain» otherwise."""

    base: BaseFormat | None = None
    """The format that the base's linear weights are packed in; None: they are plain."""
    base_storage: str | None = None
    """Of a packed base the dtype whose elements its weights are packed in; None without."""
    stored: Any = None
    """How the model's files pack their weights in ``base`` already; None where they do not."""

    @property
    def state_ranks(self) -> int:
        """Number of ranks that divide what the strategy shards: gradients, optimizer state, master weights."""
        return self.world_size // self.mesh.columns if self.traits.hybrid == "weights" else self.mesh.shard

    @property
    def reduces_each_micro_batch(self) -> bool:
        """Whether gradients are summed over the ranks after each micro-batch; else after the last one of a step."""
        asked = self.recipe.strategy.sync
        return self.traits.reduces_each_micro_batch if asked is None else asked == "every"

    @functools.cached_property
    def whole_blocks(self) -> int:
        """Number of blocks, from the first, whose frozen weights are whole on every process, under a strategy that
        shards weights."""
        asked = asked_whole(self.recipe)
        return 0 if asked is None else int(asked.settings)

    @property
    def token_parts(self) -> int:
        """Number of parts that a window's tokens are divided into: samples over data-parallel ranks, the rows of each
        over the ranks of ``strategy.mesh.context``. Strategies average gradients over them."""
        return self.data_size * self.mesh.context

    @property
    def ranks_per_part(self) -> int:
        """Number of ranks that compute the same tokens: 1 if each has its own."""
        return self.world_size // self.token_parts

    def data_rank(self, rank: int) -> int:
        """The data-parallel rank, from 0 to ``data_size`` - 1, of a process: which samples it gets."""
        return rank % self.mesh.stage_size // (self.mesh.stage_size // self.data_size)

    def token_rank(self, rank: int) -> int:
        """Which of ``token_parts`` a process computes; those of the same samples are consecutive, but for stages of a
        pipeline."""
        return rank % self.mesh.stage_size // (self.mesh.stage_size // self.token_parts)

    @property
    def part_ranks(self) -> list[int]:
        """A process for each of ``token_parts``: one of those that compute its loss."""
        first = (self.mesh.pipeline - 1) * self.mesh.stage_size
        return list(range(first, first + self.mesh.stage_size, self.mesh.stage_size // self.token_parts))

    def row_part(self, rank: int) -> RowPart | None:
        """Which tokens of its rows a process computes; None for all of them."""
        context = self.mesh.context
        return None if context == 1 else RowPart(self.token_rank(rank) % context, context)

    @property
    def rate_factor(self) -> float:
        """What the learning rates of the recipe are multiplied by for this global batch (``optimizer.lr_scaling``)."""
        return rate_factor(self.recipe.optimizer, self.global_size)

    @property
    def lr(self) -> float:
        """Peak learning rate of parameters that no group matches."""
        return self.recipe.optimizer.lr * self.rate_factor

    def warmup(self, total_steps: int) -> int:
        """Warm-up steps of a run of ``total_steps``; a fraction is rounded up, as in transformers."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        return math.ceil((self.recipe.schedule.warmup_ratio or 0.0) * total_steps)
