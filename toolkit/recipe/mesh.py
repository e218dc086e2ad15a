"""The mesh of a recipe: over how many processes each kind of parallelism divides the work. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from toolkit.layouts import layouts_of
from toolkit.recipe.mesh_refusals import mesh_refusal

if TYPE_CHECKING:
    from toolkit.recipe.schema import Machine, MeshAxes, Recipe
    from toolkit.recipe.traits import Traits


@dataclass(frozen=True)
class Mesh:
    """How the training state is divided, and the tokens. ``tensor``: consecutive ranks that divide the matrices of each
    layer. ``shard``: ranks at the same place of such groups, one group after another, that divide the sharded state
    between them. ``replicate``: groups of those; the ranks at the same place of each hold the same part. ``context``:
    ranks that divide the tokens of the same rows, at the same place of consecutive groups of ``tensor``; they are among
    the ranks of the two others.
    ``expert``: consecutive ranks that divide the experts of each layer; they are among the ranks of ``shard``.
    ``pipeline``: the outermost axis: the first ranks, as many as the others make, have the first blocks of the model,
    the next ranks the next ones.
    ``others``: axes of layouts in files of their own, whose ranks lie as those of ``tensor`` do."""

    replicate: int
    shard: int
    context: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    others: tuple[tuple[str, int], ...] = ()

    @property
    def axes(self) -> dict[str, int]:
        """The axes that a layout divides something over, with more than one rank."""
        own = {"context": self.context, "tensor": self.tensor, "pipeline": self.pipeline, "expert": self.expert}
        return {axis: size for axis, size in (*own.items(), *self.others) if size > 1}

    @property
    def columns(self) -> int:
        """How many consecutive ranks train on the same samples, each with its part of some weights."""
        return self.tensor * math.prod(size for _, size in self.others)

    @property
    def weights(self) -> tuple[object, ...]:
        """What the shapes of a rank's weights depend on."""
        return self.tensor, self.expert, *self.others

    @property
    def stage_size(self) -> int:
        """The number of ranks that have the same blocks of the model."""
        return self.replicate * self.shard * self.columns

    def stage(self, rank: int) -> int:
        """Which of ``pipeline`` groups of consecutive blocks a rank has, from 0."""
        return rank // self.stage_size

    def stage_ranks(self, rank: int) -> list[int]:
        """The ranks that pass the same micro-batches on to each other with this one, in the order of their stages."""
        return list(range(rank % self.stage_size, self.pipeline * self.stage_size, self.stage_size))

    def replica(self, rank: int) -> int:
        """Which copy of its state a rank holds."""
        return rank % self.stage_size // (self.columns * self.shard)

    def place(self, rank: int) -> int:
        """A rank's place among those of ``shard``, from 0: which part of the sharded state it holds."""
        return rank // self.columns % self.shard

    def context_ranks(self, rank: int) -> list[int]:
        """The ranks that divide the tokens of its rows with this one, and have the same part of every layer."""
        column, at = self.column(rank), rank // self.columns
        first = at - at % self.context
        return [(first + index) * self.columns + column for index in range(self.context)]

    def column(self, rank: int) -> int:
        """A rank's place among those of ``columns``, from 0: which part of each divided weight it holds."""
        return rank % self.columns

    def layer_ranks(self, rank: int) -> list[int]:
        """The ranks that divide the layers with this one."""
        first = rank - self.column(rank)
        return list(range(first, first + self.columns))

    def state_peers(self, rank: int) -> list[int]:
        """The ranks that hold the same part of every layer as this one, or shard it with this one: those that sum
        gradients."""
        first = self.stage(rank) * self.stage_size
        return list(range(first + self.column(rank), first + self.stage_size, self.columns))

    def expert_ranks(self, rank: int) -> list[int]:
        """The ranks that divide the experts of each layer with this one."""
        first = rank - rank % self.expert
        return list(range(first, first + self.expert))

    def expert_peers(self, rank: int) -> list[int]:
        """The ranks that have the same experts as this one."""
        return list(range(rank % self.expert, self.stage_size, self.expert))

    def expert_copies(self, rank: int) -> list[int]:
        """Those of ``expert_peers`` that shard the experts with this one."""
        return [other for other in self.expert_peers(rank) if self.replica(other) == self.replica(rank)]

    @property
    def expert_shards(self) -> int:
        """How many ranks shard the same experts between them."""
        return max(1, self.shard // self.expert)

    def divided_alike(self, world: int, traits: Traits) -> dict[str, int] | None:
        """``strategy.mesh`` for a strategy without copies of what it shards, with rows and, where it divides any,
        layers divided as here; None where they are not."""
        divided = {
            layout.name: size
            for layout, size in layouts_of(self)
            if layout.name not in ("pipeline", "expert") and layout.under(traits)
        }
        if not divided:
            return None
        return divided | {"shard" if traits.shards else "replicate": world // math.prod(divided.values())}

    @property
    def hybrid(self) -> bool:
        """Whether state is both sharded and replicated."""
        return self.replicate > 1 and self.shard > 1

    @classmethod
    def of(cls, asked: MeshAxes, shards: bool) -> Mesh:
        """The mesh of a recipe. Ranks of the context axis train the same weights on other tokens, so they divide the
        state where the strategy does (``shards``), and else hold copies of it. Those of the expert axis train the same
        weights but experts on other samples, under strategies that shard."""
        axes = asked.context, asked.tensor, asked.pipeline, asked.expert
        others = tuple(asked.others.items())
        if shards:
            return cls(asked.replicate, asked.shard * asked.context * asked.expert, *axes, others)
        return cls(asked.replicate * asked.context, asked.shard, *axes, others)


def stage_blocks(blocks: int, stages: int) -> list[range]:
    """Which of a model's ``blocks`` each stage has: as many each, the first ones one more where that leaves a rest,
    since the last stage has the head."""
    each, rest = divmod(blocks, stages)
    starts = [stage * each + min(stage, rest) for stage in range(stages + 1)]
    return [range(first, end) for first, end in pairwise(starts)]


Action = tuple[str, int]
"""«forward» or «backward», and the number of a micro-batch."""


def one_forward_one_backward(stage: int, stages: int, micros: int) -> list[Action]:
    """What stage ``stage`` of ``stages`` does with the micro-batches of a window, in order (1F1B; Narayanan et al.,
    arXiv:2104.04473, figure 4). It runs ahead by as many forwards as there are stages after it, then takes turns."""
    ahead = min(micros, stages - 1 - stage)
    found: list[Action] = [("forward", micro) for micro in range(ahead)]
    for micro in range(micros):
        if ahead + micro < micros:
            found.append(("forward", ahead + micro))
        found.append(("backward", micro))
    return found


@dataclass(frozen=True)
class RowPart:
    """One of ``count`` equal parts of every row, in order, from 0."""

    index: int
    count: int

    def tokens(self, length: int) -> range:
        """Positions of its tokens in a row of ``length``, a multiple of ``count``."""
        own = length // self.count
        return range(self.index * own, (self.index + 1) * own)


def mesh_problems(recipe: Recipe, traits: Traits) -> list[str]:
    """What is wrong with ``strategy.mesh``, of its sizes and of its axes together; each begins with the key."""
    asked = recipe.strategy.mesh
    if asked is None:
        return []
    machine = recipe.machine
    product = asked.replicate * asked.shard * math.prod(asked.axes.values())
    world = machine.processes * machine.nodes
    if product != world:
        written = f"replicate {asked.replicate} x shard {asked.shard}"
        written += "".join(f" x {axis} {size}" for axis, size in asked.axes.items())
        written += f" = {product}"
        return [f"strategy.mesh: {written}, but there are {_processes(machine)}; {_instead(recipe, world, product)}"]
    if (refused := mesh_refusal(recipe, traits)) is not None:
        return [refused]
    for layout, size in layouts_of(asked):
        if layout.exchange and machine.processes % size:
            return [
                f"{layout.key}: {size} consecutive ranks {layout.exchange} and have to be on one node, which has "
                f"{machine.processes} processes; set a divisor of {machine.processes}"
            ]
    if machine.processes % (asked.tensor * asked.context):
        together = asked.tensor * asked.context
        return [
            f"strategy.mesh.context: {asked.context} x {asked.tensor} (tensor) consecutive ranks exchange in every "
            f"layer and have to be on one node, which has {machine.processes} processes; set two numbers whose "
            f"product, now {together}, divides {machine.processes}"
        ]
    together = asked.columns * asked.expert
    node = machine.processes // together
    if asked.shard % node and node % asked.shard:
        ranks = "consecutive ranks" if together == 1 else f"groups of {together} ranks"
        return [
            f"strategy.mesh.shard: groups of {asked.shard} {ranks} do not fit into nodes of "
            f"{machine.processes} processes; set a divisor or a multiple of {node}"
        ]
    return []


def _processes(machine: Machine) -> str:
    if machine.nodes == 1:
        return f"{machine.processes} processes"
    return f"{machine.processes * machine.nodes} processes ({machine.processes} x {machine.nodes} nodes)"


def _instead(recipe: Recipe, world: int, product: int) -> str:
    asked, nodes = recipe.strategy.mesh, recipe.machine.nodes
    assert asked is not None
    rows = world
    for axis, size in asked.axes.items():
        if rows % size:
            return f"set {axis} to a divisor of {rows}" if rows > 1 else f"set {axis}: 1"
        rows //= size
    if rows % asked.shard == 0 and asked.shard > 1:
        return f"set replicate: {rows // asked.shard}"
    if rows % asked.replicate == 0:
        # What a strategy shards is not known here: recipes are checked without it.
        copies = f"; under ddp, which shards nothing, replicate: {rows}" if asked.shard == 1 else ""
        return f"set shard: {rows // asked.replicate}{copies}"
    if product % nodes == 0:
        return f"set machine.processes: {product // nodes}"
    return f"set replicate and shard to two numbers whose product is {rows}"


def reasons(mesh: Mesh, machine: Machine, hybrid: str | None) -> dict[str, str]:
    """Why state is copied and sharded as often as it is, for `config --explain`; of other axes their layouts say it.
    ``hybrid``: what has copies, as the strategy's traits say."""
    node = machine.processes // mesh.columns
    across = mesh.shard // node
    if mesh.shard == 1:
        shard = "nothing is sharded"
    elif machine.nodes == 1:
        shard = "consecutive ranks" if mesh.replicate > 1 else "all processes"
    elif across <= 1:
        whole = "all" if across else f"{mesh.shard}"
        shard = f"{whole} processes of a node: weights are gathered within it"
    else:
        shard = f"{across} nodes: weights are gathered over the network between them"
    if mesh.columns > 1 and mesh.shard > 1:
        shard += f"; ranks {mesh.columns} apart, which have the same part of every layer"
    if mesh.context > 1 and mesh.shard > 1:
        shard += f"; the ranks of context divide the state too: {mesh.shard} parts of it"
    if mesh.expert > 1 and mesh.shard > 1:
        shard += (
            f"; {mesh.shard} parts of all weights but experts, and each rank's experts in {mesh.expert_shards}, over "
            f"ranks {mesh.expert} apart"
        )
    over = "" if machine.nodes == 1 else ", over the network between nodes"
    if mesh.replicate == mesh.shard == 1:
        part = "its blocks" if mesh.pipeline > 1 else "its part of every layer"
        replicate = f"no copies: each process has the whole gradient of {part}"
    elif mesh.replicate == 1:
        replicate = "no copies: gradients are summed by the shards alone"
    elif mesh.shard == 1 and mesh.pipeline > 1:
        replicate = f"copies of each stage, on {mesh.replicate} consecutive ranks: their gradients are all-reduced"
    elif mesh.shard == 1:
        replicate = f"every process holds all of the state: gradients are all-reduced{over}"
    elif hybrid == "weights":
        replicate = "second copies of the weights, one in each group of ranks: gradients are reduced over all ranks"
    else:
        replicate = f"copies of what is sharded, each {mesh.shard} ranks apart: their gradients are all-reduced{over}"
    return {"replicate": replicate, "shard": shard}
