"""Axes of `strategy.mesh` that do not work together, and axes that a strategy does not divide. Imports no torch.

Layouts know which (toolkit/layouts.py); each refusal names the key, the reason, and a strategy and mesh for the same
processes that do work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit.layouts import Layout, layouts_of
from toolkit.recipe.strategy_names import REGISTERED

if TYPE_CHECKING:
    from toolkit.recipe.schema import MeshAxes, Recipe
    from toolkit.recipe.traits import Traits


def mesh_refusal(recipe: Recipe, traits: Traits) -> str | None:
    """Why the axes of a recipe's mesh do not work together or under its strategy, and what does; or None. It begins
    with the key."""
    mesh = recipe.strategy.mesh
    assert mesh is not None
    asked = layouts_of(mesh)
    for layout, _ in reversed(asked):
        if (apart := layout.apart_from([other.name for other, _ in asked if other is not layout])) is not None:
            instead = _instead(recipe, mesh, without=layout.name)
            return f"{layout.key}: is not supported beside {apart[0]}: {apart[1]}; {instead}"
    for layout, _ in asked:
        if not layout.under(traits):
            name = recipe.strategy.name
            return f"{layout.key}: {name} does not divide {layout.what}; {_instead(recipe, mesh)}"
    return None


def _instead(recipe: Recipe, mesh: MeshAxes, without: str = "") -> str:
    """A strategy and a mesh that divide the state over the same processes."""
    kept = {axis: size for axis, size in mesh.axes.items() if axis != without}
    rest = mesh.replicate * mesh.shard * mesh.axes.get(without, 1)
    # Few experts cannot be sharded over many ranks, but copied as often as wanted.
    state = "replicate" if "expert" in kept else "shard"
    axes = ({state: rest} if rest > 1 else {}) | kept
    written = ", ".join(f"{axis}: {size}" for axis, size in axes.items())
    name = _strategy(recipe, [layout for layout, _ in layouts_of(mesh) if layout.name != without])
    return f"set strategy.name: {name} and strategy.mesh: {{{written}}}"


def _strategy(recipe: Recipe, layouts: list[Layout]) -> str:
    """The recipe's strategy where it shards weights and has ``layouts``, else the simplest that does."""
    able = [
        name
        for name, kind in REGISTERED.items()
        if "weights" in kind.traits.shards and all(layout.under(kind.traits) for layout in layouts)
    ]
    name = recipe.strategy.name
    return name if name in able else min(able, key=lambda other: REGISTERED[other].traits.precedence)
