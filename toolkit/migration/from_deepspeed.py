"""The meaning of a DeepSpeed launch: an accelerate config, a DeepSpeed JSON, or both."""

from __future__ import annotations

from typing import Any

from toolkit.linting import keys
from toolkit.linting.context import LintContext, number, same, true
from toolkit.linting.files.tree import Source
from toolkit.migration import parallel
from toolkit.migration.meaning import Meaning

# They tune DeepSpeed's own buckets and streams; the numbers that a run computes do not depend on them. Some have a
# second name that begins with stage3_.
_TUNING = {
    "allgather_partitions",
    "allgather_bucket_size",
    "overlap_comm",
    "reduce_scatter",
    "reduce_bucket_size",
    "contiguous_gradients",
    "round_robin_gradients",
    "sub_group_size",
    "use_multi_rank_bucket_allreduce",
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "memory_efficient_linear",
    "parameter_alignment",
    "ignore_unused_parameters",
    "load_from_fp32_weights",
    "use_all_reduce_for_fetch_params",
    "module_granularity_threshold",
    "allgather_sequential",
    "log_trace_cache_warnings",
}
_LOGGING = {
    "steps_per_print",
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
    "flops_profiler",
    "comms_logger",
    "log_level",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "activation_checkpointing",
    "disable_allgather",
    "managed_gradient_accumulation",
    "vocabulary_size",
    "timers",
}
_ADAM = {"lr": "learning_rate", "eps": "adam_epsilon", "weight_decay": "weight_decay"}


def read(context: LintContext, meaning: Meaning) -> None:
    """Fill ``meaning`` from the DeepSpeed side."""
    stage = context.zero_stage
    if stage in (None, 0):
        meaning.refuse(
            "zero_stage",
            "stage 0 shards nothing: it is plain data parallelism"
            if stage == 0
            else "the stage is not known: pass the DeepSpeed JSON too",
        )
        return
    meaning.source = f"zero{stage}"
    meaning.reshard = stage == 3
    meaning.rank0_loading = stage == 3
    meaning.full_checkpoint = stage != 3
    meaning.precision = str(context.precision.value) if context.precision and context.precision.value else "no"
    if "deepspeed" in context.kinds:
        _json(context.deepspeed, meaning)
    else:
        _yaml(context, meaning)
    if stage == 1:
        meaning.note(
            "zero_stage",
            "1 shards optimizer state alone; FSDP2 shards gradients and weights too, with the same result",
        )
    parallel.of_deepspeed(context, meaning)
    flag = context.acc("deepspeed_config.zero3_init_flag")
    if flag is not None and stage == 3:
        meaning.rank0_loading = true(flag.value)


def _yaml(context: LintContext, meaning: Meaning) -> None:
    for key, entry in context.accelerate.section("deepspeed_config").items():
        value, place = entry.node.plain(), str(context.accelerate.place(entry.start))
        if key in ("zero_stage", "zero3_init_flag", "deepspeed_multinode_launcher"):
            continue
        if key == "zero3_save_16bit_model":
            meaning.full_checkpoint = true(value) or meaning.source != "zero3"
        elif key == "gradient_accumulation_steps" and number(value):
            meaning.argument("gradient_accumulation_steps", value, place)
        elif key == "gradient_clipping" and number(value):
            meaning.argument("max_grad_norm", float(value), place)
        elif key in ("offload_optimizer_device", "offload_param_device"):
            _offload(meaning, key.split("_")[1], str(value), place)
        elif value not in ("auto", None):
            meaning.refuse(place, f"{key} has no equivalent")
    _finish_offload(meaning)


def _json(source: Source, meaning: Meaning) -> None:
    if not source.has("gradient_clipping"):
        meaning.argument("max_grad_norm", 1.0, f"{source.path} (DeepSpeed's default)")
    for key, entry in source.section("").items():
        value, place = entry.node.plain(), str(source.place(entry.start))
        if key.startswith(("_", "//")) or value == "auto":
            continue
        if key in _LOGGING:
            meaning.note(place, f"{key} is specific to DeepSpeed and does not change the result")
        elif key == "train_micro_batch_size_per_gpu":
            meaning.argument("per_device_train_batch_size", value, place)
        elif key == "gradient_accumulation_steps":
            meaning.argument("gradient_accumulation_steps", value, place)
        elif key == "gradient_clipping":
            meaning.argument("max_grad_norm", float(value) if number(value) else value, place)
        elif key == "train_batch_size":
            meaning.top["train_batch_size"] = value
        elif key in ("fp16", "bf16"):
            _precision(key, value, place, meaning)
        elif key == "zero_optimization":
            _zero(source, meaning)
        elif key == "optimizer":
            _optimizer(value, place, meaning)
        elif key == "scheduler":
            _scheduler(value, place, meaning)
        elif key == "tensor_parallel":
            parallel.tensor_section(value, place, meaning)
        elif key == "sequence_parallel_size":
            parallel.sequence_key(value, place, meaning)
        elif same(value, keys.section("deepspeed", "")[key].default if key in keys.section("deepspeed", "") else None):
            meaning.note(place, f"{key} is at DeepSpeed's default")
        else:
            meaning.refuse(place, f"{key} has no equivalent in FSDP2")
    _finish_offload(meaning)


def _precision(name: str, section: Any, place: str, meaning: Meaning) -> None:
    section = section if isinstance(section, dict) else {}
    if section.get("enabled") == "auto" or not true(section.get("enabled", False)):
        return
    meaning.precision = name
    meaning.argument(name, True, place)
    if name == "fp16" and section.get("loss_scale", 0) != 0:
        meaning.refuse(place, "a fixed loss scale: accelerate's scaler is dynamic")
    elif name == "fp16":
        meaning.note(
            place,
            "FSDP2 uses torch's GradScaler for the dynamic loss scale: it grows every 2000 steps, without hysteresis",
        )
    for key in ("bf16_master_weights_and_grads", "bf16_optimizer_states", "fp16_master_weights_and_grads"):
        if true(section.get(key, False)):
            meaning.refuse(place, f"{key}: accelerate's FSDP2 keeps master weights in fp32")


def _zero(source: Source, meaning: Meaning) -> None:
    for key, entry in source.section("zero_optimization").items():
        value, place = entry.node.plain(), str(source.place(entry.start))
        if key == "stage":
            continue
        if key in ("stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save"):
            meaning.full_checkpoint = true(value) or meaning.source != "zero3"
        elif key in ("offload_optimizer", "offload_param"):
            device = value.get("device", "none") if isinstance(value, dict) else str(value)
            _offload(meaning, key.removeprefix("offload_"), device, place)
        elif key.removeprefix("stage3_") in _TUNING:
            meaning.note(place, f"{key} tunes DeepSpeed's communication and does not change the result")
        elif key == "zero_hpz_partition_size" and value in (0, 1):
            continue
        elif value is False:
            meaning.note(place, f"{key} is off")
        elif not key.startswith("//"):
            meaning.refuse(place, f"{key} has no equivalent in FSDP2")


def _offload(meaning: Meaning, part: str, device: str, place: str) -> None:
    if device in ("none", "None"):
        return
    if device != "cpu":
        meaning.refuse(place, f"offload to {device}: FSDP2 offloads to the host only")
    elif part == "param":
        meaning.offload = True
    else:
        meaning.offload_optimizer = True


def _finish_offload(meaning: Meaning) -> None:
    if meaning.offload_optimizer and not meaning.offload:
        meaning.refuse(
            "offload_optimizer",
            "FSDP2 offloads weights, gradients and optimizer state together, not one of them",
        )
    elif meaning.offload and not meaning.offload_optimizer:
        meaning.refuse(
            "offload_param", "FSDP2 offloads weights, gradients and optimizer state together, not one of them"
        )


def _optimizer(section: Any, place: str, meaning: Meaning) -> None:
    section = section if isinstance(section, dict) else {}
    kind, params = str(section.get("type")), section.get("params") or {}
    if kind.lower() not in ("adam", "adamw") or params.get("adam_w_mode", True) is False:
        meaning.refuse(
            place,
            f"optimizer {kind}: only Adam with decoupled weight decay has an equivalent in the training arguments",
        )
        return
    meaning.argument("optim", "adamw_torch", place)
    for key, value in params.items():
        if value == "auto" or key in ("torch_adam", "adam_w_mode"):
            continue
        if key in _ADAM:
            meaning.argument(_ADAM[key], value, place)
        elif key == "betas" and isinstance(value, list) and len(value) == 2:
            meaning.argument("adam_beta1", value[0], place)
            meaning.argument("adam_beta2", value[1], place)
        else:
            meaning.refuse(place, f"optimizer parameter {key} has no equivalent")


def _scheduler(section: Any, place: str, meaning: Meaning) -> None:
    section = section if isinstance(section, dict) else {}
    kind, params = str(section.get("type")), section.get("params") or {}
    names = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear"}
    if (
        kind not in names
        or params.get("warmup_type", "log") != "linear"
        or params.get("warmup_min_lr", 0) not in (0, "auto")
    ):
        meaning.refuse(
            place,
            f"scheduler {kind}: only a linear warm-up from 0 (warmup_type: linear) has an "
            "equal in the training arguments",
        )
        return
    meaning.argument("lr_scheduler_type", names[kind], place)
    for key, name in (
        ("warmup_max_lr", "learning_rate"),
        ("warmup_num_steps", "warmup_steps"),
        ("total_num_steps", "max_steps"),
    ):
        if params.get(key, "auto") != "auto":
            meaning.argument(name, params[key], place)
