"""What an engine is given: a model before its strategy wraps it, and what was found out about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from toolkit.model.built import Built
from toolkit.model.freezing import Frozen
from toolkit.model.stages import Stage
from toolkit.model.tensor import Division
from toolkit.model.unreached import Reach
from toolkit.recipe.resolve import Resolved


@dataclass
class Prepared:
    """A model before a strategy wraps it: adapters added, checkpointing applied, dtypes set, on the CPU."""

    model: nn.Module
    resolved: Resolved
    built: Built
    decayed: frozenset[str] = frozenset()
    """Names of the trained weights that decay."""
    blocks: list[tuple[str, nn.Module]] = field(default_factory=list)
    bases: dict[str, int] = field(default_factory=dict)
    """QLoRA: the quantised weights, elements by name."""
    options: dict[str, Any] = field(default_factory=dict)
    """What each option of the recipe says of its change, by its name (``Option.prepare``)."""
    matrices: frozenset[str] = frozenset()
    """Names of the trainable hidden matrices."""

    reach: Reach = field(default_factory=lambda: Reach([]))
    """Which weights rows reach; what none does is frozen."""
    frozen: list[Frozen] = field(default_factory=list)
    """What each pattern of ``model.freeze`` has frozen."""
    loaded_whole: str | None = None
    """Why every process loaded the whole model although the strategy shards it; None where each reads its part: then
    parameters are on the meta device and have sources (``toolkit/model/sources.py``)."""

    notes: list[str] = field(default_factory=list)
    """What the recipe's adapter is on, where the recipe does not say it in so many words."""

    divisions: dict[str, Division] = field(default_factory=dict)
    """``strategy.mesh.tensor``: how each weight is divided of which this rank has a part, by name."""

    stage: Stage | None = None
    """``strategy.mesh.pipeline``: which of the model's blocks this rank has."""

    def trainable(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by name, in the model's order, tied ones once; of a stage its own."""
        named = self.model.named_parameters() if self.stage is None else self.stage.own.items()
        return {name: p for name, p in named if p.requires_grad}

    def trained_of(self, wrapped: nn.Module) -> dict[str, nn.Parameter]:
        """The same of the model that a strategy has made of it, with other parameters by the same names."""
        names = {} if self.stage is None else self.stage.names
        return {names.get(name, name): p for name, p in wrapped.named_parameters() if p.requires_grad}
