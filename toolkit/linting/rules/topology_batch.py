"""LT5xx: the batch that processes share, and the sizes of parallelism."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.linting.edits import set_value
from toolkit.linting.examples import ds, fsdp2
from toolkit.linting.model import Said
from toolkit.linting.registry import rule
from toolkit.linting.world import World, number

_BATCH = "deepspeed 0.19.8 runtime/config.py:_batch_assertion"


@rule(
    "LT501",
    "error",
    source=_BATCH,
    fails=ds(train_batch_size=10, gradient_accumulation_steps=2),
    passes=ds(train_batch_size=16, gradient_accumulation_steps=2),
)
def batch_arithmetic(world: World) -> Iterator[Said]:
    """train_batch_size is not processes × micro-batch × accumulation, or no number of processes fits."""
    setting = world.ds("train_batch_size")
    micro, steps = (
        world.deepspeed.get("train_micro_batch_size_per_gpu"),
        world.deepspeed.get("gradient_accumulation_steps"),
    )
    if world.reader == "trainer" and world.processes is not None and "args" in world.kinds:
        return  # XL206 has the Trainer's numbers
    if setting is None or not all(number(n) and n > 0 for n in (setting.value, micro)):
        return
    steps = steps if number(steps) and steps > 0 else None
    unit = micro * (steps or 1)
    if setting.value % unit:
        shown = f"{micro} × {steps} accumulation" if steps else f"the micro-batch of {micro}"
        yield Said(setting, f"{setting.value} is no multiple of {shown}: no number of processes fits")
    elif world.processes is not None and world.parallel_extra == 1:
        total = world.processes.value * unit
        if (steps and setting.value != total) or setting.value % total:
            yield Said(
                setting,
                f"{setting.value} here, but {world.processes.value} processes × {micro} × {steps or 1} = {total}",
            )


@rule(
    "LT505",
    "error",
    source="accelerate 1.15.0 parallelism_config.py:_validate_accelerator (ValueError)",
    fails=fsdp2(top=("parallelism_config:", "  parallelism_config_dp_shard_size: 4")),
    passes=fsdp2(top=("parallelism_config:", "  parallelism_config_dp_shard_size: 2")),
)
def parallel_sizes(world: World) -> Iterator[Said]:
    """The sizes of parallelism_config do not multiply to the number of processes."""
    section, processes = World._in(world.accelerate, "parallelism_config"), world.processes
    if section is None or processes is None:
        return
    sizes = [
        world.accelerate.get(f"parallelism_config.parallelism_config_{k}_size", 1)
        for k in ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    ]
    if not all(isinstance(size, int) and size > 0 for size in sizes) or sizes[4] > 1:
        return  # sequence parallelism: DeepSpeed makes the groups itself
    total = sizes[0] * sizes[1] * sizes[2] * sizes[3]
    if total > 1 and total != processes.value:
        yield Said(section, f"the sizes multiply to {total}, num_processes is {processes.value}")


@rule(
    "LT506",
    "error",
    source="accelerate 1.15.0 parallelism_config.py:_validate_accelerator (ValueError)",
    fails=fsdp2(top=("parallelism_config:", "  parallelism_config_dp_replicate_size: 2")),
    passes=fsdp2(top=("parallelism_config:", "  parallelism_config_dp_shard_size: 2")),
)
def nothing_to_shard_over(world: World) -> Iterator[Said]:
    """FSDP2 with a parallelism_config that leaves it nothing to shard over."""
    section = World._in(world.accelerate, "parallelism_config")
    if section is None or not section.value or world.distributed_type != "FSDP" or world.fsdp_version != 2:
        return
    if all(world.accelerate.get(f"parallelism_config.parallelism_config_{k}_size", 1) == 1 for k in ("dp_shard", "cp")):
        yield Said(
            section,
            "dp_shard_size and cp_size are both 1: FSDP2 has no dimension to shard over and accelerate refuses it",
        )


@rule(
    "LT513",
    "warning",
    source="deepspeed 0.19.8 runtime/config.py:_set_batch_related_parameters (floor division)",
    fails=ds(None, train_micro_batch_size_per_gpu=None, train_batch_size=6, gradient_accumulation_steps=4),
    passes=ds(None, train_micro_batch_size_per_gpu=None, train_batch_size=8, gradient_accumulation_steps=4),
)
def derived_batch(world: World) -> Iterator[Said]:
    """The derived micro-batch is not whole: DeepSpeed rounds it down and then asserts."""
    batch, steps = world.ds("train_batch_size"), world.deepspeed.get("gradient_accumulation_steps")
    if (
        batch
        and number(batch.value)
        and number(steps)
        and steps > 0
        and world.ds("train_micro_batch_size_per_gpu") is None
    ) and batch.value % steps:
        yield Said(batch, f"{batch.value} is not a multiple of gradient_accumulation_steps {steps}")


@rule(
    "LT514",
    "error",
    source=_BATCH,
    fails=ds(gradient_accumulation_steps=0),
    passes=ds(gradient_accumulation_steps=1),
)
def batch_of_nothing(world: World) -> Iterator[Said]:
    """A batch size or an accumulation of zero or less."""
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        setting = world.ds(key)
        if setting and number(setting.value) and setting.value <= 0:
            yield Said(setting, f"{key} must be above 0", set_value(setting, 1) if "accum" in key else None)
    for key in ("gradient_accumulation_steps", "per_device_train_batch_size"):
        setting = world.arg(key)
        if setting and number(setting.value) and setting.value <= 0:
            yield Said(setting, f"{key} must be above 0")
