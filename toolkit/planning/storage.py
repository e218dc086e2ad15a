"""What a node reads from its disk and writes to it: the model, a checkpoint, a resumed checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.rooms import state_bytes
from toolkit.strategies.memory.base import BYTES, MemoryModel

GB = 1e9


@dataclass(frozen=True)
class Storage:
    """Bytes of one node, which all its processes read or write together. What several of them read whole, the disk
    gives once: the system keeps it."""

    load_bytes: int = 0
    """Of the model's files. 0 if it is made from a config."""
    save_bytes: int = 0
    """Of one checkpoint: the node's part of trained weights and optimizer state, without the index."""
    resume_bytes: int = 0

    @classmethod
    def of(cls, held: MemoryModel) -> Storage:
        """For a strategy's memory model. toolkit/training/checkpoint.py divides what is written over all processes, and
        of what is read each takes what it holds."""
        resolved, machine = held.resolved, held.resolved.recipe.machine
        share = min(1.0, machine.processes / resolved.state_ranks)
        """Of what is sharded: the part that the processes of a node hold."""
        weights, state = _weights(held), _state(held)
        shards = resolved.traits.shards
        resumed = weights * (share if "weights" in shards else 1) + state * (share if "optimizer" in shards else 1)
        return cls(
            round(_files(held) * (share if held.by_part() else 1)), (weights + state) // machine.nodes, round(resumed)
        )

    @classmethod
    def of_stages(cls, whole: MemoryModel, stages: Sequence[MemoryModel]) -> Storage:
        """The same for pipeline stages. ``whole``: the memory model of all of them together. A node reads what its
        stages have, or a part of one; of what is saved it has an equal part."""
        mesh, machine = whole.resolved.mesh, whole.resolved.recipe.machine
        here = max(1, machine.processes // mesh.stage_size) / mesh.pipeline
        each, most = [cls.of(held) for held in stages], cls.of(whole)
        # A tied weight is on two stages; it is saved once, and read once by a node that has both.
        return cls(
            min(most.load_bytes, round(here * sum(one.load_bytes for one in each))),
            most.save_bytes,
            min(most.resume_bytes, round(here * sum(one.resume_bytes for one in each))),
        )

    def seconds(self, speed: float) -> dict[str, float]:
        """At ``speed``, GB/s of a node's disk, for each of the three."""
        return {
            name.removesuffix("_bytes"): size / (speed * GB) for name, size in dataclasses.asdict(self).items()
        }  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def line(self, speed: float) -> str:
        """For the screen."""
        took = self.seconds(speed)
        said = (
            f"{what} {size / GB:,.1f} GB, {took[key]:,.0f} s"
            for key, what, size in (
                ("load", "the model", self.load_bytes),
                ("save", "a checkpoint", self.save_bytes),
                ("resume", "resuming", self.resume_bytes),
            )
        )
        return f"disk of a node at {speed:g} GB/s: {' · '.join(said)}"


def _files(held: MemoryModel) -> int:
    """Bytes of the model's files: its weights, without an adapter's, in the dtype that its config names."""
    if held.resolved.recipe.model.path is None:
        return 0
    config = held.resolved.facts.config or {}
    kept = BYTES.get(str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."), 4)
    packed = held.resolved.stored is not None
    adapted = held.resolved.recipe.adapter is not None
    return sum(
        count * ((w.packed or 0) + w.statistics if packed and w.packed is not None else w.numel * w.ranks * kept)
        for unit, count in held.holdings.units()
        for w in unit
        if not (adapted and w.trains)
    )


def _weights(held: MemoryModel) -> int:
    """Bytes of the trained weights, in the dtype that they are trained in, and of what options keep of them."""
    elements = held.holdings.elements(True, whole=True)
    return elements * held.trained + state_bytes(held.resolved.recipe, elements)


def _state(held: MemoryModel) -> int:
    """Bytes of the optimizer's state. 8-bit moments are saved as they are for a resume: in the trained dtype."""
    kind = held.optimizer
    found = 0.0
    for unit, count in held.holdings.units():
        for w in unit:
            if w.trains and kind.packed:
                found += 2.0 * count * w.numel * w.ranks * held.trained
            elif w.trains:
                found += count * w.ranks * kind.state(w.shape, w.matrix, held.trained)
    return round(found)
