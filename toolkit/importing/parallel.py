"""accelerate's parallelism_config as `strategy.mesh` (accelerate 1.15.0, DeepSpeed 0.19.8)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from toolkit.importing.draft import Draft
from toolkit.importing.outcome import Key, Outcome
from toolkit.linting.context import LintContext
from toolkit.linting.files.tree import Source
from toolkit.linting.model import Setting
from toolkit.linting.parallel import AXES, reads_sizes, size, written

_PREFIX = "parallelism_config_"
_MESH = {"dp_replicate": "replicate", "dp_shard": "shard", "tp": "tensor", "cp": "context", "sp": "context"}
_HOW = {"cp_backend", "cp_comm_strategy", "sp_backend", "sp_seq_length", "sp_seq_length_is_variable",
        "sp_attn_implementation"}  # fmt: skip
_ZERO = ("zero1", "zero2", "zero3")


@dataclass(frozen=True)
class _Became:
    """What became of an axis. ``mesh``: it is an axis of the recipe's mesh."""

    outcome: Outcome
    reason: str
    mesh: bool = False


def read(draft: Draft, sources: list[Source], strategy: str, names_processes: bool) -> None:
    """Carry the sizes over where the strategy's launch reads them; every key gets its outcome.

    ``names_processes``: whether the files say how many processes start; else the product of the sizes does.
    """
    context = LintContext(sources)
    if not reads_sizes(context):
        for found in _settings(context):
            _note(draft, found, "no-effect", "this launch does not read it (toolkit explain LT521): every size is 1")
        return
    mesh: dict[str, int] = {}
    axes: list[Setting] = []
    for found in _settings(context):
        name = found.name.removeprefix(_PREFIX)
        axis = name.removesuffix("_size")
        if not found.name.startswith(_PREFIX) or not (name in _HOW or axis in AXES):
            _note(draft, found, "unknown", "accelerate 1.15.0 has no such key in parallelism_config")
        elif name in _HOW:
            _note(draft, found, "no-effect", "how parts of rows are exchanged; the recipe's context axis is Ulysses")
        elif found.value == 1:
            _note(draft, found, "no-effect", "1: divides nothing")
        elif size(context, axis) == 1:
            _note(draft, found, "unsupported", f"{found.value!r} is not a whole number of 1 or more")
        else:
            became = _became(axis, strategy, context)
            _note(draft, found, became.outcome, became.reason, "strategy.mesh" if became.mesh else "")
            if became.mesh:
                mesh[_MESH[axis]] = size(context, axis)
                axes.append(found)
    _set(draft, strategy, mesh, axes, names_processes)


def _set(draft: Draft, strategy: str, mesh: dict[str, int], axes: list[Setting], names_processes: bool) -> None:
    nodes = draft.values.get("machine.nodes", 1)
    if not names_processes and math.prod(mesh.values()) > 1 and math.prod(mesh.values()) % nodes == 0:
        draft.set("machine.processes", math.prod(mesh.values()) // nodes, "the product of parallelism_config")
    if not set(mesh) - {"shard"}:
        return  # the recipe shards over all processes without a mesh; accelerate refuses any other size
    world = draft.values.get("machine.processes", 1) * nodes
    rest = "shard" if strategy in _ZERO or "tensor" in mesh else "replicate"
    if rest not in mesh and strategy != "fsdp2" and world % math.prod(mesh.values()) == 0:
        mesh[rest] = world // math.prod(mesh.values())
    order = ("replicate", "shard", "context", "tensor")
    places = ", ".join(f"{found.place.file}:{found.place.line} {found.name}" for found in axes)
    draft.set("strategy.mesh", {axis: mesh[axis] for axis in order if mesh.get(axis, 1) > 1}, places)
    if "tensor" in mesh:
        draft.set("strategy.name", "fsdp2", places)


def _became(axis: str, strategy: str, context: LintContext) -> _Became:
    if strategy == "fsdp1":
        return _Became("unsupported", "accelerate rejects parallelism_config under FSDP1")
    if strategy == "fsdp2":
        return _of_fsdp2(axis)
    if strategy in _ZERO:
        return _of_zero(axis, strategy)
    if axis == "tp":
        return _Became(
            "carried", "the recipe divides the layers, under fsdp2; accelerate leaves it to the script", True
        )
    if axis == "dp_replicate":
        return _Became("no-effect", "copies on every process, which plain data parallelism has")
    if axis == "dp_shard" and size(context, "tp") == 1:
        return _Became("no-effect", "accelerate runs plain DDP: nothing is sharded (toolkit explain LT519)")
    return _Became("unsupported", f"{axis}_size: accelerate does not train with it under MULTI_GPU (LT519, LT525)")


def _of_fsdp2(axis: str) -> _Became:
    if axis == "sp":
        return _Became("unsupported", "nothing reads it under FSDP (toolkit explain LT525); set strategy.mesh.context")
    if axis == "tp":
        return _Became("carried", "the recipe divides the layers; accelerate leaves that to the script", True)
    if axis == "cp":
        return _Became(
            "carried",
            "accelerate passes keys and values around (ring attention) and drops masks, the recipe exchanges heads "
            "(Ulysses) and keeps the masks of packed rows; the sums are equal but for their order",
            True,
        )
    return _Became("carried", "", True)


def _of_zero(axis: str, strategy: str) -> _Became:
    if axis in ("dp_replicate", "dp_shard"):
        return _Became("no-effect", "DeepSpeed does not read it: it shards over all processes")
    if axis != "sp":
        return _Became("unsupported", f"DeepSpeed does not read {axis}_size (toolkit explain LT524)")
    if strategy == "zero3":
        return _Became("carried", "both exchange heads (Ulysses)", True)
    return _Became(
        "differs", "DeepSpeed's gradients are sp_size times as large before clipping (toolkit explain LT527)", True
    )


def _settings(context: LintContext) -> list[Setting]:
    """Every key of the section that counts: the command's flag before the file's key."""
    flags = context.launch.section("") if context.launch.launcher == "accelerate" else {}
    given = [Setting(context.launch, key, entry) for key, entry in flags.items() if key.startswith(_PREFIX)]
    names = {found.name for found in given}
    return [*given, *(found for found in written(context) if found.name not in names)]


def _note(draft: Draft, found: Setting, outcome: Outcome, reason: str, recipe: str = "") -> None:
    draft.keys.append(Key(found.name, found.value, outcome, found.place, (recipe,) if recipe else (), reason))
