"""The mesh of a recipe: over how many processes each kind of parallelism divides the work. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toolkit.recipe.schema import Machine, Recipe

AXES = ("replicate", "shard", "context", "tensor", "pipeline", "expert")
SERVED = ("replicate", "shard")


@dataclass(frozen=True)
class Mesh:
    """Sizes of the axes that are served. ``shard``: consecutive ranks that divide the sharded state between them.
    ``replicate``: such groups; the ranks at the same place of each hold the same part."""

    replicate: int
    shard: int

    def replica(self, rank: int) -> int:
        """Which group of ranks a rank belongs to."""
        return rank // self.shard

    def place(self, rank: int) -> int:
        """A rank's place in its group, from 0: which part of the sharded state it holds."""
        return rank % self.shard

    @property
    def hybrid(self) -> bool:
        """Whether state is both sharded and replicated."""
        return self.replicate > 1 and self.shard > 1


def mesh_problems(recipe: Recipe) -> list[str]:
    """What is wrong with ``strategy.mesh``, whatever the strategy; each begins with the key."""
    asked = recipe.strategy.mesh
    if asked is None:
        return []
    sizes = {axis: int(getattr(asked, axis)) for axis in AXES}
    found = [
        f"strategy.mesh.{axis}: {axis} parallelism is not supported yet; remove it, and divide the "
        f"{_processes(recipe.machine)} between replicate and shard"
        for axis, size in sizes.items()
        if size > 1 and axis not in SERVED
    ]
    if found:
        return found
    machine, product = recipe.machine, math.prod(sizes.values())
    world = machine.processes * machine.nodes
    if product != world:
        told = f"replicate {asked.replicate} x shard {asked.shard} = {product}"
        return [f"strategy.mesh: {told}, but there are {_processes(machine)}; {_instead(recipe, world, product)}"]
    if asked.shard % machine.processes and machine.processes % asked.shard:
        return [
            f"strategy.mesh.shard: groups of {asked.shard} consecutive ranks do not fit into nodes of "
            f"{machine.processes} processes; set a divisor or a multiple of {machine.processes}"
        ]
    return []


def _processes(machine: Machine) -> str:
    if machine.nodes == 1:
        return f"{machine.processes} processes"
    return f"{machine.processes * machine.nodes} processes ({machine.processes} x {machine.nodes} nodes)"


def _instead(recipe: Recipe, world: int, product: int) -> str:
    asked, nodes = recipe.strategy.mesh, recipe.machine.nodes
    assert asked is not None
    if world % asked.shard == 0 and asked.shard > 1:
        return f"set replicate: {world // asked.shard}"
    if world % asked.replicate == 0:
        return f"set shard: {world // asked.replicate}"
    if product % nodes == 0:
        return f"set machine.processes: {product // nodes}"
    return f"set replicate and shard to two numbers whose product is {world}"


def reasons(mesh: Mesh, machine: Machine, hybrid: str | None) -> dict[str, str]:
    """Why each axis has its size, for `config --explain`. ``hybrid``: what has copies, as the strategy's traits say."""
    across = mesh.shard // machine.processes
    if mesh.shard == 1:
        shard = "nothing is sharded"
    elif machine.nodes == 1:
        shard = "consecutive ranks" if mesh.replicate > 1 else "all processes"
    elif across <= 1:
        whole = "all" if across else f"{mesh.shard}"
        shard = f"{whole} processes of a node: weights are gathered within it"
    else:
        shard = f"{across} nodes: weights are gathered over the network between them"
    over = "" if machine.nodes == 1 else ", over the network between nodes"
    if mesh.replicate == 1:
        replicate = "no copies: gradients are summed by the shards alone"
    elif mesh.shard == 1:
        replicate = f"every process holds all of the state: gradients are all-reduced{over}"
    elif hybrid == "weights":
        replicate = "second copies of the weights, one in each group of ranks: gradients are reduced over all ranks"
    else:
        replicate = f"copies of what is sharded, each {mesh.shard} ranks apart: their gradients are all-reduced{over}"
    unserved = dict.fromkeys((axis for axis in AXES if axis not in SERVED), "not supported yet")
    return {"replicate": replicate, "shard": shard, **unserved}
