"""The interface of a strategy: its traits, its derived values, its part of the launch files, its communication, and its
engine.

Nothing here imports torch; ``engine`` names the module that does, imported when a run starts.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from toolkit.errors import InputError
from toolkit.layouts import layouts_of
from toolkit.plugins import named
from toolkit.recipe.resolve import Decisions, Resolved
from toolkit.recipe.schema import Recipe
from toolkit.recipe.strategy_names import REGISTERED, register
from toolkit.recipe.traits import Traits
from toolkit.rooms import asked_options

if TYPE_CHECKING:
    from toolkit.strategies.engines.base import Engine
    from toolkit.strategies.memory.base import Holdings, MemoryModel
    from toolkit.strategies.traffic import Axis, Traffic


class Strategy:
    """One way to distribute the training state. A subclass with a ``name`` registers itself."""

    name: ClassVar[str]
    title: ClassVar[str]
    """One line for the screen: what is sharded."""
    distributed_type: ClassVar[str]
    """accelerate's DistributedType, as its YAML writes it."""
    traits: ClassVar[Traits]
    offloads: ClassVar[tuple[str, ...]] = ("none",)
    engine: ClassVar[str]
    """``module:class`` of the engine. Where a mesh divides more than state and rows, layouts come before it
    (``traits.layouts``)."""
    memory: ClassVar[str]
    """``module:class`` of the memory model: the bytes that the strategy uses on a device."""

    def __init_subclass__(cls) -> None:
        if vars(cls).get("staged_engine") is not None:
            warnings.warn(
                f"{cls.__name__}: staged_engine and Traits(stages=True) are Traits(layouts={{'pipeline'}}) now; the "
                "next release does not read them",
                DeprecationWarning,
                stacklevel=2,
            )
            cls.traits = replace(cls.traits, layouts=cls.traits.layouts | {"pipeline"})
        if "name" in vars(cls):
            register(cls.name, cls)

    def data_size(self, recipe: Recipe) -> int:
        """Data-parallel size: the number of parts that a window's samples are divided into.

        If it is less than the number of processes, consecutive ranks share a part: they get the same samples.
        """
        mesh = recipe.strategy.mesh
        # A mesh that does not fit is refused as such (recipe/mesh.py).
        alike = 1 if mesh is None else mesh.context * mesh.columns * mesh.pipeline
        return max(1, recipe.machine.processes * recipe.machine.nodes // alike)

    def traffic(self, resolved: Resolved, holdings: Holdings) -> Traffic:
        """Communication of one rank in one step."""
        raise NotImplementedError

    def collectives_by_axis(self, resolved: Resolved) -> tuple[tuple[str, Axis], ...]:
        """The collectives of the first step with a mesh, each by the name of `verify` and its axis."""
        return ()

    def check(self, resolved: Resolved) -> None:
        """Reject what this strategy does not support; raises InputError."""
        offload = resolved.recipe.strategy.offload
        if offload not in self.offloads:
            can = ", ".join(self.offloads)
            others = [name for name, other in REGISTERED.items() if offload in other.offloads]
            raise InputError(
                f"{resolved.source}: strategy.offload: {self.name} cannot offload {offload!r}; supported: {can}"
                + (f" ({', '.join(others)} can offload {offload!r})" if others else "")
            )
        self._check_mesh(resolved)
        self._check_sync(resolved)
        for option, settings in asked_options(resolved.recipe):
            if reason := option.why_not_strategy(settings, resolved):
                raise InputError(f"{resolved.source}: {option.key}: {reason}")

    def check_reach(self, by_row: Sequence[str], resolved: Resolved, *, by_values: Sequence[str] = ()) -> None:
        """Raise InputError if the strategy cannot train a model of which ``by_row``, names of weights, get a gradient
        from some rows alone, or of which ``by_values``, names of modules, run as often as values say."""

    def _check_sync(self, resolved: Resolved) -> None:
        asked = resolved.recipe.strategy.sync
        own = "every" if self.traits.reduces_each_micro_batch else "last"
        where = f"{resolved.source}: strategy.sync"
        if asked is None:
            return
        if not self.traits.distributed:
            raise InputError(f"{where}: {self.name} is one process, nothing is summed over ranks; remove it")
        if asked != own and not self.traits.other_sync:
            can = ", ".join(name for name, other in REGISTERED.items() if other.traits.other_sync)
            raise InputError(
                f"{where}: {self.name} sums gradients after {'every micro-batch' if own == 'every' else 'the last'} "
                f"alone; set {own}, or use one of {can}"
            )
        if asked == "last" and resolved.recipe.strategy.offload == "all":
            raise InputError(
                f"{where}: last keeps whole gradients on the device, and offload: all is to keep them off it; set every"
            )

    def _check_mesh(self, resolved: Resolved) -> None:
        mesh, shards = resolved.mesh, bool(self.traits.shards)
        if resolved.recipe.strategy.mesh is None:
            return
        hybrids = ", ".join(name for name, other in REGISTERED.items() if other.traits.hybrid)
        where = f"{resolved.source}: strategy.mesh"
        rows = resolved.world_size // mesh.context // mesh.columns // mesh.pipeline
        if mesh.shard > 1 and not shards:
            raise InputError(
                f"{where}.shard: {self.name} keeps all weights in every process; set shard: 1 and "
                f"replicate: {rows}, or use one of {hybrids}"
            )
        if mesh.shard == 1 and mesh.replicate * mesh.pipeline > 1 and shards:
            other = "replicate: 1" if mesh.columns > 1 else "a strategy that keeps all weights in every process (ddp)"
            raise InputError(
                f"{where}.shard: with 1 {self.name} has nothing to shard; set a larger number, or use {other}"
            )
        if mesh.hybrid and resolved.recipe.strategy.offload != "none":
            raise InputError(
                f"{resolved.source}: strategy.offload: is not verified with copies (strategy.mesh.replicate); set "
                "offload: none, or remove strategy.mesh"
            )
        if mesh.hybrid and not self.traits.hybrid:
            raise InputError(
                f"{where}.replicate: {self.name} shards over all processes, and the packages have no hybrid of it; set "
                f"replicate: 1 and shard: {rows}, or use one of {hybrids}"
            )

    def settings(self, resolved: Resolved, decide: Decisions) -> Any:
        """The strategy's own derived values, each decided with a reason."""
        return None

    def accelerate_config(self, resolved: Resolved, folder: Path) -> dict[str, Any]:
        """The strategy's keys of accelerate.yaml, which is written to ``folder``."""
        return {}

    def deepspeed_config(self, resolved: Resolved) -> dict[str, Any] | None:
        """The contents of deepspeed.json, or None."""
        return None

    def engine_class(self) -> type[Engine]:
        """The engine's class; imports torch and more."""
        return named(self.engine)

    def engine_for(self, resolved: Resolved) -> type[Engine]:
        """The engine's class for a recipe: with the layouts of the axes that divide its model."""
        layouts = [layout for layout, _ in layouts_of(resolved.mesh) if layout.engine]
        if [layout.name for layout in layouts] == ["pipeline"] and (
            staged := getattr(self, "staged_engine", None)
        ) is not None:
            return named(staged)  # of a strategy for an earlier version
        engine: Any = self.engine_class()  # a class, which mypy does not take for hashable
        return _composed(tuple(layout.engine for layout in layouts), engine)

    def memory_model(self) -> type[MemoryModel]:
        """The memory model's class; imports nothing heavy."""
        return named(self.memory)


@functools.cache
def _composed(layouts: tuple[str, ...], engine: Any) -> type[Engine]:
    """``engine`` with a class for each axis that divides the model before it among the base classes; itself without
    one."""
    bases = (*map(named, layouts), engine)
    return type("".join(base.__name__ for base in bases), bases, {"__doc__": engine.__doc__}) if layouts else engine
