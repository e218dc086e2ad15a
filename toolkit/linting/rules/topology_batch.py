"""LT5xx: the batch that processes share, and the sizes of parallelism."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.linting.context import LintContext, number
from toolkit.linting.edits import set_value
from toolkit.linting.examples import ds, fsdp2
from toolkit.linting.model import Diagnostic
from toolkit.linting.parallel import autotp, size
from toolkit.linting.registry import rule

_BATCH = "deepspeed 0.19.8 runtime/config.py:DeepSpeedConfig.__init__ (world_size), _batch_assertion"


@rule(
    "LT501",
    "error",
    source=_BATCH,
    fails=ds(train_batch_size=10, gradient_accumulation_steps=2),
    passes=ds(train_batch_size=16, gradient_accumulation_steps=2),
)
def batch_arithmetic(context: LintContext) -> Iterator[Diagnostic]:
    """train_batch_size is not processes × micro-batch × accumulation, or no number of processes fits.

    The processes that AutoTP gives one layer count in full (autotp_size does not divide them), though they train on the
    same samples. sequence_parallel_size divides them.
    """
    setting = context.ds("train_batch_size")
    micro, steps = (
        context.deepspeed.get("train_micro_batch_size_per_gpu"),
        context.deepspeed.get("gradient_accumulation_steps"),
    )
    if context.reader == "trainer" and context.processes is not None and "args" in context.kinds:
        return  # XL206 has the Trainer's numbers
    if setting is None or not all(number(n) and n > 0 for n in (setting.value, micro)):
        return
    steps = steps if number(steps) and steps > 0 else None
    unit = micro * (steps or 1)
    if setting.value % unit:
        shown = f"{micro} × {steps} accumulation" if steps else f"the micro-batch of {micro}"
        yield Diagnostic(setting, f"{setting.value} is not a multiple of {shown} for any number of processes")
    elif (ranks := _ranks(context)) is not None:
        total = ranks * unit
        divided = ranks // autotp(context) * unit
        if context.reader == "deepspeed" and (setting.value == divided or (not steps and setting.value % divided == 0)):
            return  # a script of DeepSpeed's may give it groups (mpu), whose data-parallel ranks then count
        if (steps and setting.value != total) or setting.value % total:
            yield Diagnostic(
                setting,
                f"{setting.value} here, but {ranks} processes × {micro} × {steps or 1} = {total}",
            )


def _ranks(context: LintContext) -> int | None:
    """The processes that DeepSpeed's assertion counts; None where accelerate writes another batch over the file's."""
    if context.processes is None or size(context, "sp") > 1:
        return None
    rows = context.deepspeed.get("sequence_parallel_size", 1)
    if not isinstance(rows, int) or rows < 1 or context.processes.value % rows:
        return None
    return int(context.processes.value) // rows


@rule(
    "LT505",
    "error",
    source="accelerate 1.15.0 parallelism_config.py:_validate_accelerator (ValueError)",
    fails=fsdp2(top=("parallelism_config:", "  parallelism_config_dp_shard_size: 4")),
    passes=fsdp2(top=("parallelism_config:", "  parallelism_config_dp_shard_size: 2")),
)
def parallel_sizes(context: LintContext) -> Iterator[Diagnostic]:
    """The sizes of parallelism_config do not multiply to the number of processes."""
    section, processes = LintContext._in(context.accelerate, "parallelism_config"), context.processes
    if section is None or processes is None:
        return
    sizes = [
        context.accelerate.get(f"parallelism_config.parallelism_config_{k}_size", 1)
        for k in ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    ]
    if not all(isinstance(size, int) and size > 0 for size in sizes) or sizes[4] > 1:
        return  # sequence parallelism: DeepSpeed makes the groups itself
    total = sizes[0] * sizes[1] * sizes[2] * sizes[3]
    if total > 1 and total != processes.value:
        yield Diagnostic(section, f"the sizes multiply to {total}, num_processes is {processes.value}")


@rule(
    "LT506",
    "error",
    source="accelerate 1.15.0 parallelism_config.py:_validate_accelerator (ValueError)",
    fails=fsdp2(top=("parallelism_config:", "  parallelism_config_dp_replicate_size: 2")),
    passes=fsdp2(top=("parallelism_config:", "  parallelism_config_dp_shard_size: 2")),
)
def nothing_to_shard_over(context: LintContext) -> Iterator[Diagnostic]:
    """FSDP2 with a parallelism_config that leaves it nothing to shard over."""
    section = LintContext._in(context.accelerate, "parallelism_config")
    if section is None or not section.value or context.distributed_type != "FSDP" or context.fsdp_version != 2:
        return
    if all(
        context.accelerate.get(f"parallelism_config.parallelism_config_{k}_size", 1) == 1 for k in ("dp_shard", "cp")
    ):
        yield Diagnostic(
            section,
            "dp_shard_size and cp_size are both 1: FSDP2 has no dimension to shard over, and accelerate rejects this",
        )


@rule(
    "LT513",
    "warning",
    source="deepspeed 0.19.8 runtime/config.py:_set_batch_related_parameters (floor division)",
    fails=ds(None, train_micro_batch_size_per_gpu=None, train_batch_size=6, gradient_accumulation_steps=4),
    passes=ds(None, train_micro_batch_size_per_gpu=None, train_batch_size=8, gradient_accumulation_steps=4),
)
def derived_batch(context: LintContext) -> Iterator[Diagnostic]:
    """The derived micro-batch is not an integer: DeepSpeed rounds it down and then asserts."""
    batch, steps = context.ds("train_batch_size"), context.deepspeed.get("gradient_accumulation_steps")
    if (
        batch
        and number(batch.value)
        and number(steps)
        and steps > 0
        and context.ds("train_micro_batch_size_per_gpu") is None
    ) and batch.value % steps:
        yield Diagnostic(batch, f"{batch.value} is not a multiple of gradient_accumulation_steps {steps}")


@rule(
    "LT514",
    "error",
    source=_BATCH,
    fails=ds(gradient_accumulation_steps=0),
    passes=ds(gradient_accumulation_steps=1),
)
def batch_of_nothing(context: LintContext) -> Iterator[Diagnostic]:
    """A batch size or an accumulation of zero or less."""
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        setting = context.ds(key)
        if setting and number(setting.value) and setting.value <= 0:
            yield Diagnostic(setting, f"{key} must be above 0", set_value(setting, 1) if "accum" in key else None)
    for key in ("gradient_accumulation_steps", "per_device_train_batch_size"):
        setting = context.arg(key)
        if setting and number(setting.value) and setting.value <= 0:
            yield Diagnostic(setting, f"{key} must be above 0")
