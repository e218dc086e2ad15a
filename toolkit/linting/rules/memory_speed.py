"""MM6xx: settings that waste memory or time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from toolkit.linting.context import LintContext, number, true
from toolkit.linting.examples import ds, fsdp2, zero
from toolkit.linting.model import Diagnostic
from toolkit.linting.registry import rule


def _values(section: Any) -> list[Any]:
    return list(section.values()) if isinstance(section, dict) else []


_DEFAULT_BUCKET = 5e8  # deepspeed 0.19.8 runtime/zero/config.py


@rule(
    "MM601",
    "warning",
    source="deepspeed 0.19.8 runtime/zero/stage_1_and_2.py:setup_buckets (buf_0, buf_1)",
    fails=ds(zero={"overlap_comm": True, "reduce_bucket_size": 500000000}),
    passes=ds(zero={"overlap_comm": True, "reduce_bucket_size": 50000000}),
)
def overlap_with_big_buckets(context: LintContext) -> Iterator[Diagnostic]:
    """overlap_comm with large buckets takes gigabytes on every GPU.

    Stages 1 and 2 then fill one bucket of gradients while another is reduced: two buffers of reduce_bucket_size
    elements, in the dtype of the gradients (4 bytes under stage 1 with fp32 accumulation). 5e7 elements cost a tenth of
    the default and are fast enough on most links. Stage 3 keeps one bucket either way.
    """
    stage = context.deepspeed.get("zero_optimization.stage", 0)
    overlap, bucket = (
        context.ds("zero_optimization.overlap_comm"),
        context.ds("zero_optimization.reduce_bucket_size"),
    )
    on = overlap is not None and true(overlap.value)
    on &= true(context.deepspeed.get("zero_optimization.contiguous_gradients", True))
    size = bucket.value if bucket is not None else _DEFAULT_BUCKET
    if not on or stage not in (1, 2) or not number(size) or size < _DEFAULT_BUCKET:
        return
    gigabytes = 2 * size * (4 if stage == 1 else 2) / 1e9
    shown = f"reduce_bucket_size {size:.0e}" if bucket is not None else "the default reduce_bucket_size of 5e8"
    yield Diagnostic(
        bucket or overlap, f"overlap_comm with {shown} keeps two buckets: about {gigabytes:.1f} GB on every GPU"
    )


@rule(
    "MM602",
    "note",
    source="deepspeed docs, ZeRO-Offload (host memory and PCIe carry the optimizer step)",
    fails=ds(zero={"offload_optimizer": {"device": "cpu"}}),
    passes=ds(),
)
def offload_costs(context: LintContext) -> Iterator[Diagnostic]:
    """Offload to the host is slow; avoid it if the state fits on the GPU."""
    settings = [context.ds(f"zero_optimization.offload_{part}.device") for part in ("optimizer", "param")]
    settings += [context.acc(f"deepspeed_config.offload_{part}_device") for part in ("optimizer", "param")]
    for setting in settings:
        if setting and str(setting.value) in ("cpu", "nvme"):
            yield Diagnostic(
                setting, f"offload to {setting.value}: slower; use it only if GPU memory is not sufficient"
            )
            return
    offload = context.fsdp("cpu_offload") if context.uses == "fsdp" else None
    if offload and true(offload.value):
        yield Diagnostic(
            offload, "parameters and optimizer step on the CPU: slower; use it only if GPU memory is not sufficient"
        )


@rule(
    "MM603",
    "note",
    source="deepspeed 0.19.8 runtime/zero/offload_config.py (pin_memory)",
    fails=ds(zero={"offload_optimizer": {"device": "cpu", "pin_memory": False}}),
    passes=ds(zero={"offload_optimizer": {"device": "cpu", "pin_memory": True}}),
)
def offload_not_pinned(context: LintContext) -> Iterator[Diagnostic]:
    """Offload without pinned memory: copies are synchronous and slow.

    Correct only if memlock or host memory is limited.
    """
    for part in ("optimizer", "param"):
        setting = context.ds(f"zero_optimization.offload_{part}.pin_memory")
        device = context.deepspeed.get(f"zero_optimization.offload_{part}.device")
        if setting and setting.value is False and device in ("cpu", "nvme"):
            yield Diagnostic(setting, "without pinned memory copies do not overlap with compute")


@rule(
    "MM604",
    "note",
    source="deepspeed 0.19.8 utils/timer.py:CudaEventTimer.get_elapsed_msec, comm/comm.py:timed_op (synchronise the "
    "device), runtime/utils.py:see_memory_usage (gc.collect)",
    fails=ds(wall_clock_breakdown=True),
    passes=ds(wall_clock_breakdown=False),
)
def profiling_left_on(context: LintContext) -> Iterator[Diagnostic]:
    """Profiling is on: every step waits for it.

    Timers and the log of collectives wait for the device. memory_breakdown collects Python's garbage several times a
    step on the first rank, for which the others wait.
    """
    waits = "synchronises the device in every step"
    for key, what in (
        ("wall_clock_breakdown", waits),
        ("memory_breakdown", "collects Python's garbage several times a step"),
        ("flops_profiler.enabled", waits),
        ("comms_logger.enabled", waits),
    ):
        setting = context.ds(key)
        if setting and setting.value is True:
            yield Diagnostic(setting, f"{key.partition('.')[0]} {what}: disable it in long runs")


@rule(
    "MM605",
    "warning",
    source="transformers 5.23.0: no module of it calls deepspeed.checkpointing",
    fails=ds(activation_checkpointing={"partition_activations": True}),
    passes=ds(),
)
def checkpointing_section(context: LintContext) -> Iterator[Diagnostic]:
    """DeepSpeed's activation_checkpointing section does nothing for a transformers model.

    It configures deepspeed.checkpointing, which a model must call itself; transformers models use torch's.
    Turn checkpointing on in the training arguments.
    """
    setting = context.ds("activation_checkpointing")
    if setting and any(true(value) for value in _values(setting.value) if not isinstance(value, dict)):
        yield Diagnostic(setting, "has no effect on transformers models: they do not call deepspeed.checkpointing")


@rule(
    "MM606",
    "note",
    source="deepspeed 0.19.8 runtime/zero/stage_1_and_2.py (a collective per bucket)",
    fails=ds(zero={"reduce_bucket_size": 100000}),
    passes=ds(zero={"reduce_bucket_size": 50000000}),
)
def tiny_buckets(context: LintContext) -> Iterator[Diagnostic]:
    """Buckets so small that latency dominates every collective."""
    for key in ("reduce_bucket_size", "allgather_bucket_size"):
        setting = context.ds(f"zero_optimization.{key}")
        if setting and number(setting.value) and 0 < setting.value < 1_000_000:
            yield Diagnostic(setting, f"{setting.value:g} elements per bucket: thousands of small collectives per step")


@rule(
    "MM607",
    "note",
    source="accelerate 1.15.0 utils/dataclasses.py:DeepSpeedPlugin.set_deepspeed_weakref (whatever the flag is), "
    "utils/operations.py:GatheredParameters; transformers 5.23.0 integrations/deepspeed.py:is_deepspeed_zero3_enabled",
    fails=zero("zero_stage: 3", "zero3_init_flag: false", "zero3_save_16bit_model: true"),
    passes=zero("zero_stage: 3", "zero3_init_flag: true", "zero3_save_16bit_model: true"),
)
def sharded_as_it_loads(context: LintContext) -> Iterator[Diagnostic]:
    """zero3_init_flag: false under ZeRO-3: transformers shards its models as it loads them all the same.

    accelerate tells transformers of ZeRO-3 whatever the flag is, and from_pretrained then divides each weight among
    the processes. Where the flag is false, accelerate.utils.GatheredParameters gathers nothing: a script that reads
    weights in it finds them empty.
    """
    setting = context.acc("deepspeed_config.zero3_init_flag")
    if setting and not true(setting.value) and context.zero_stage == 3:
        yield Diagnostic(
            setting,
            "transformers shards its models as it loads them all the same; accelerate's GatheredParameters gathers "
            "nothing",
        )


@rule(
    "MM608",
    "note",
    source="torch.distributed.fsdp.fully_shard (reshard_after_forward); accelerate 1.15.0 fsdp_utils.py",
    fails=fsdp2("fsdp_reshard_after_forward: false"),
    passes=fsdp2("fsdp_reshard_after_forward: true"),
)
def no_resharding(context: LintContext) -> Iterator[Diagnostic]:
    """reshard_after_forward: false keeps the gathered weights until the backward pass.

    That is ZeRO-2's memory, and less traffic than resharding.
    """
    setting = context.fsdp("reshard_after_forward")
    if setting and context.uses == "fsdp" and context.fsdp_version == 2 and str(setting.value).lower() == "false":
        yield Diagnostic(setting, "the whole model stays gathered from forward to backward, as under ZeRO-2")
