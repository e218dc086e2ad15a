"""Axes of `strategy.mesh` that do not work together, and axes that a strategy does not divide. Imports no torch.

One table for all of them; each refusal names the key, the reason, and a strategy and mesh for the same processes that
do work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from toolkit.recipe.strategy_names import REGISTERED

if TYPE_CHECKING:
    from toolkit.recipe.schema import MeshAxes, Recipe
    from toolkit.recipe.traits import Traits

WHAT = {"tensor": "layers", "pipeline": "blocks", "expert": "experts"}
"""The axes that a strategy needs a layout for (``Traits.layouts``), and what each divides."""


@dataclass(frozen=True)
class Pair:
    """``axis`` does not work beside ``other``. ``shard`` takes its place in what is proposed."""

    axis: str
    other: str
    why: str


PAIRS = (
    Pair("pipeline", "tensor", "a stage has its layers whole"),
    Pair("pipeline", "expert", "a stage has all experts of its blocks"),
    Pair("pipeline", "context", "a stage passes whole rows on"),
    Pair("tensor", "expert", "ranks that divide experts have everything else whole"),
    Pair("context", "expert", "ranks that divide experts have whole rows"),
)


def mesh_refusal(recipe: Recipe, traits: Traits) -> str | None:
    """Why the axes of a recipe's mesh do not work together or under its strategy, and what does; or None. It begins
    with the key."""
    mesh = recipe.strategy.mesh
    assert mesh is not None
    for pair in PAIRS:
        if getattr(mesh, pair.axis) > 1 and getattr(mesh, pair.other) > 1:
            instead = _instead(recipe, mesh, without=pair.axis)
            return f"strategy.mesh.{pair.axis}: is not supported beside {pair.other}: {pair.why}; {instead}"
    for axis, what in WHAT.items():
        if getattr(mesh, axis) > 1 and axis not in traits.layouts:
            name = recipe.strategy.name
            return f"strategy.mesh.{axis}: {name} does not divide {what}; {_instead(recipe, mesh)}"
    return None


def _instead(recipe: Recipe, mesh: MeshAxes, without: str = "") -> str:
    """A strategy and a mesh that divide the state over the same processes."""
    kept = {axis: getattr(mesh, axis) for axis in ("context", *WHAT) if axis != without and getattr(mesh, axis) > 1}
    rest = mesh.replicate * mesh.shard * (getattr(mesh, without) if without else 1)
    # Few experts cannot be sharded over many ranks, but copied as often as wanted.
    state = "replicate" if "expert" in kept else "shard"
    axes = ({state: rest} if rest > 1 else {}) | kept
    written = ", ".join(f"{axis}: {size}" for axis, size in axes.items())
    return f"set strategy.name: {_strategy(recipe, kept)} and strategy.mesh: {{{written}}}"


def _strategy(recipe: Recipe, axes: dict[str, int]) -> str:
    """The recipe's strategy where it shards weights and divides ``axes``, else the simplest that does."""
    able = [
        name
        for name, kind in REGISTERED.items()
        if "weights" in kind.traits.shards and axes.keys() - {"context"} <= kind.traits.layouts
    ]
    name = recipe.strategy.name
    return name if name in able else min(able, key=lambda other: REGISTERED[other].traits.precedence)
