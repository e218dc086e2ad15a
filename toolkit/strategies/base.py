"""What a strategy answers: its derived values, its part of the launch files, and the engine that trains with it.

Nothing here imports torch; ``engine`` names the module that does, loaded when a run starts.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from toolkit.errors import InputError
from toolkit.recipe.resolve import Decisions, Resolved

if TYPE_CHECKING:
    from toolkit.strategies.engines.base import Engine
    from toolkit.strategies.ledgers.base import Ledger


class Strategy:
    """One way to spread the training state. Subclasses are found by their ``name``."""

    name: ClassVar[str]
    title: ClassVar[str]
    """One line for people: what is spread."""
    distributed_type: ClassVar[str]
    """accelerate's DistributedType, as its YAML writes it."""
    offloads: ClassVar[tuple[str, ...]] = ("none",)
    engine: ClassVar[str]
    """``module:class`` of the engine."""
    ledger: ClassVar[str]
    """``module:class`` of the ledger, which says what the strategy keeps in memory."""

    def check(self, resolved: Resolved) -> None:
        """Refuse what this strategy cannot do; raises InputError."""
        offload = resolved.recipe.strategy.offload
        if offload not in self.offloads:
            can = ", ".join(self.offloads)
            raise InputError(
                f"{resolved.source}: strategy.offload: {self.name} cannot offload {offload!r}; it can: {can}"
                + ("" if len(self.offloads) > 1 else " (zero1, zero2 and zero3 offload the optimizer)")
            )

    def settings(self, resolved: Resolved, decide: Decisions) -> Any:
        """The strategy's own derived values, each decided with a reason."""
        return None

    def accelerate_config(self, resolved: Resolved, folder: Path) -> dict[str, Any]:
        """The strategy's keys of accelerate.yaml, which will lie in ``folder``."""
        return {}

    def deepspeed_config(self, resolved: Resolved) -> dict[str, Any] | None:
        """The whole deepspeed.json, or None."""
        return None

    def engine_class(self) -> type[Engine]:
        """The class that makes a model train this way; imports torch and more."""
        module, _, name = self.engine.partition(":")
        return getattr(importlib.import_module(module), name)

    def ledger_class(self) -> type[Ledger]:
        """The class that says what this strategy keeps in memory; imports nothing heavy."""
        module, _, name = self.ledger.partition(":")
        return getattr(importlib.import_module(module), name)
