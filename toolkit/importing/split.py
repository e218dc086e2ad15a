"""transformers' DistributedConfig as strategy `fsdp2` and `strategy.mesh` (transformers 5.23.0)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from toolkit.importing.draft import Draft
from toolkit.importing.outcome import Key, Outcome
from toolkit.linting.files.tree import Entry, Source

_SIZES = ("pp_size", "dp_replicate_size", "fsdp_size", "tp_size", "ep_size")
_PLANS: dict[str, tuple[Any, ...]] = {"tp_plan": ({}, "auto"), "ep_plan": ({},), "fsdp_plan": ({},)}
"""Plans that leave the model's own as it is."""


@dataclass(frozen=True)
class Split:
    """A model that transformers splits. ``amp``: what its blocks compute in, where that is not the weights' dtype."""

    amp: str | None


def read(draft: Draft, source: Source) -> Split | None:
    """Carry the sizes over; every key gets its outcome. None where the config splits nothing."""
    sizes = {key: _size(source, key) for key in _SIZES}
    mesh = _mesh(sizes)
    entries = source.section("")
    for key, entry in entries.items():
        _note(draft, source, entry, *_outcome(key, entry.node.plain(), sizes))
    if math.prod(mesh.values()) == 1:
        return None
    places = ", ".join(f"{source.place(entries[key].start).file}:{source.place(entries[key].start).line} {key}"
                       for key in _SIZES if sizes[key] > 1)  # fmt: skip
    draft.set("strategy.name", "fsdp2", places)
    nodes = draft.values.get("machine.nodes", 1)
    if "machine.processes" not in draft.values and math.prod(mesh.values()) % nodes == 0:
        draft.set("machine.processes", math.prod(mesh.values()) // nodes, "the product of DistributedConfig's sizes")
    if any(size > 1 for axis, size in mesh.items() if axis != "shard"):
        draft.set("strategy.mesh", {axis: size for axis, size in mesh.items() if size > 1}, places)
    if source.get("fsdp_cpu_offload") is True:
        draft.set("strategy.offload", "all", f"{source.path} fsdp_cpu_offload")
    return Split("bf16" if source.get("fsdp_mixed_precision") is True else None)


def _size(source: Source, key: str) -> int:
    value = source.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 1


def _mesh(sizes: dict[str, int]) -> dict[str, int]:
    """The recipe's axes. transformers divides experts within fsdp_size, the recipe counts what is left as ``shard``."""
    expert = sizes["ep_size"] if _divides_experts(sizes) else 1
    return {
        "replicate": sizes["dp_replicate_size"],
        "shard": sizes["fsdp_size"] // expert,
        "expert": expert,
        "tensor": sizes["tp_size"],
    }


def _divides_experts(sizes: dict[str, int]) -> bool:
    """Whether the recipe's `expert` axis is the same split: experts over ranks with samples of their own."""
    return sizes["tp_size"] == 1 and sizes["fsdp_size"] % sizes["ep_size"] == 0


def _outcome(key: str, value: Any, sizes: dict[str, int]) -> tuple[Outcome, str, str]:
    """Outcome, reason and the recipe's key."""
    off = value in (None, False) or (key in _SIZES and value == 1)
    if off:
        return "no-effect", "divides nothing" if key in _SIZES else "off", ""
    if key == "pp_size":
        return "unsupported", "transformers' stages are others than the recipe's; set strategy.mesh.pipeline", ""
    if key == "ep_size" and not _divides_experts(sizes):
        return "unsupported", "the recipe divides experts over ranks with samples of their own: tp_size 1", ""
    if key in _SIZES:
        return "carried", "", "strategy.name" if key == "fsdp_size" else "strategy.mesh"
    if key == "fsdp_mixed_precision":
        return "carried", "bf16 for the blocks, gradients summed in float32", "precision"
    if key == "fsdp_cpu_offload":
        return "carried", "", "strategy.offload"
    if key in _PLANS:
        if value in _PLANS[key]:
            return "no-effect", "the model's own plan", ""
        return "unsupported", "a plan of the file's own; the recipe has that of each model", ""
    if key == "enable_expert_parallel" and sizes["ep_size"] == 1:
        return "unsupported", "an old name (toolkit explain DC106); set ep_size", ""
    if key == "enable_sequence_parallel":
        return "no-effect", "transformers does not use it yet (toolkit explain DC104)", ""
    if key in ("enable_expert_parallel", "ep_implementation"):
        return "no-effect", "how experts get their tokens; the recipe exchanges them (all_to_all)", ""
    return "unknown", "DistributedConfig of transformers 5.23.0 has no such key", ""


def _note(draft: Draft, source: Source, entry: Entry, outcome: Outcome, reason: str, recipe: str) -> None:
    place = source.place(entry.start)
    draft.keys.append(Key(entry.key, entry.node.plain(), outcome, place, (recipe,) if recipe else (), reason))
