"""parallelism_config, AutoTP and DeepSpeed's sequence parallelism: carried over, safely dropped, or refused by name.

accelerate 1.15.0, DeepSpeed 0.19.8 and transformers 5.23.0 share one meaning: replicas of sharded groups, between FSDP1
and FSDP2. Their tensor, context and sequence parallelism are read by one of them each.
"""

from __future__ import annotations

import math
from typing import Any

from toolkit.linting.context import LintContext
from toolkit.linting.parallel import AXES, reads_sizes, setting, size, written
from toolkit.migration.meaning import Meaning

_PREFIX = "parallelism_config_"
# Keys that count only beside the size of their axis.
_OF = {"cp_backend": "cp", "cp_comm_strategy": "cp", "sp_backend": "sp", "sp_seq_length": "sp",
       "sp_seq_length_is_variable": "sp", "sp_attn_implementation": "sp"}  # fmt: skip
_TENSOR = (
    "accelerate divides no layer by it, the script does; for DeepSpeed set tensor_parallel.autotp_size in its JSON and "
    "load the model whole, or keep FSDP2"
)
_ROWS = {
    "cp": "torch's context parallelism has no equivalent in DeepSpeed, whose own (sp_size) divides attention by heads; "
    "set parallelism_config_sp_size in the new file and check that it divides the heads, or keep FSDP2",
    "sp": "nothing reads it under FSDP: the rows of this run are whole; remove it",
}


def of_fsdp(context: LintContext, meaning: Meaning, version: int) -> None:
    """Fill replicas and shards from FSDP2's sizes, and refuse what only accelerate's FSDP2 reads."""
    if not _read(context, meaning):
        return
    large = [axis for axis in AXES if size(context, axis) > 1]
    if version == 1 and large:
        place = _place(context, large[0])
        meaning.refuse(place, f"{large[0]}_size: accelerate rejects parallelism_config under FSDP1; remove the section")
        return
    for axis in large:
        if axis == "tp":
            meaning.refuse(_place(context, axis), f"tp_size {size(context, axis)}: {_TENSOR}")
        elif axis in _ROWS:
            meaning.refuse(_place(context, axis), f"{axis}_size {size(context, axis)}: {_ROWS[axis]}")
    if version == 2:
        meaning.replicas = size(context, "dp_replicate")
        meaning.shards = size(context, "dp_shard")
    _sizes_fit(context, meaning)


def of_deepspeed(context: LintContext, meaning: Meaning) -> None:
    """Refuse what DeepSpeed reads of parallelism_config; note what it does not read."""
    if not _read(context, meaning):
        return
    for axis in AXES:
        count, place = size(context, axis), _place(context, axis)
        if count == 1:
            continue
        if axis in ("dp_replicate", "dp_shard"):
            meaning.note(place, f"{axis}_size: DeepSpeed shards over all processes, and so do the new files")
        elif axis == "sp":
            meaning.refuse(
                place,
                f"sp_size {count}: FSDP2 has no Ulysses; its own cp_size runs with sdpa, without packing or sliding "
                "windows: set it in the new file and check the model, or keep DeepSpeed",
            )
        else:
            meaning.refuse(place, f"{axis}_size {count}: DeepSpeed does not read it (toolkit explain LT524); remove it")


def tensor_section(section: Any, place: str, meaning: Meaning) -> None:
    """The section tensor_parallel of a DeepSpeed JSON."""
    count = section.get("autotp_size", 0) if isinstance(section, dict) else 0
    if count in (0, 1):
        meaning.note(place, "tensor_parallel: AutoTP is off (autotp_size)")
        return
    meaning.refuse(
        place,
        f"tensor_parallel.autotp_size {count}: DeepSpeed divides the layers itself; under FSDP2 accelerate's tp_size "
        "divides none, and fails with a model that transformers has divided (toolkit explain LT530). Remove it, or "
        "keep DeepSpeed",
    )


def sequence_key(value: Any, place: str, meaning: Meaning) -> None:
    """sequence_parallel_size of a DeepSpeed JSON."""
    if value in (0, 1):
        meaning.note(place, "sequence_parallel_size: rows are whole")
    else:
        meaning.refuse(
            place,
            f"sequence_parallel_size {value}: the script divides rows with DeepSpeed's groups, which FSDP2 has not",
        )


def _read(context: LintContext, meaning: Meaning) -> bool:
    """Whether the launch reads any size; notes what has no effect, refuses what is unknown."""
    if not reads_sizes(context):
        for found in written(context):
            meaning.note(str(found.place), f"{found.name}: this launch does not read it (toolkit explain LT521)")
        return False
    sizes = {f"{axis}_size": axis for axis in AXES}
    for found in written(context):
        name = found.name.removeprefix(_PREFIX)
        if not found.name.startswith(_PREFIX) or name not in {**sizes, **_OF}:
            meaning.refuse(str(found.place), f"{found.name}: accelerate has no such key in parallelism_config")
        elif name in _OF and size(context, _OF[name]) == 1:
            meaning.note(str(found.place), f"{name}: nothing reads it while {_OF[name]}_size is 1")
        elif name in sizes and setting(context, name) == found and size(context, sizes[name]) != found.value:
            meaning.refuse(str(found.place), f"{name}: {found.value!r} is not a whole number of 1 or more")
    return True


def _place(context: LintContext, axis: str) -> str:
    found = setting(context, f"{axis}_size")
    return str(found.place) if found is not None else f"parallelism_config.{axis}_size"


def _sizes_fit(context: LintContext, meaning: Meaning) -> None:
    """Refuse sizes that accelerate refuses: their product is the number of processes."""
    product = math.prod(size(context, axis) for axis in AXES)
    if meaning.refused or product == 1:
        return
    if context.processes is not None and context.processes.value != product:
        meaning.refuse(
            "parallelism_config",
            f"the sizes multiply to {product}, num_processes is {context.processes.value}: accelerate rejects this",
        )
