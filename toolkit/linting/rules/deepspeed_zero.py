"""DS2xx: ZeRO stages and offload."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.linting.context import LintContext, number, true
from toolkit.linting.edits import add, remove, set_value
from toolkit.linting.examples import acc, args, ds
from toolkit.linting.model import Diagnostic
from toolkit.linting.near import meant, nearest
from toolkit.linting.parallel import autotp
from toolkit.linting.registry import rule

_THREE = acc(
    "distributed_type: DEEPSPEED",
    "num_processes: 3",
    "deepspeed_config:",
    "  deepspeed_config_file: ds.json",
)
_GATHERED = "stage3_gather_16bit_weights_on_model_save"
_SELECTIVE = {"selective": True, "use_reentrant": False}


@rule(
    "DS205",
    "error",
    source="deepspeed 0.19.8 runtime/zero/config.py:offload_ratio_check, compute_grad_norm_valid",
    fails=ds(zero={"offload_optimizer": {"device": "cpu", "ratio": 0.5}}),
    passes=ds(3, zero={"offload_optimizer": {"device": "cpu", "ratio": 0.5}}),
)
def wrong_stage(context: LintContext) -> Iterator[Diagnostic]:
    """A ZeRO setting that this stage rejects.

    Partial offload (ratio below 1) is for stage 3; compute_grad_norm: false for stages 1 and 2.
    """
    stage = context.deepspeed.get("zero_optimization.stage", 0)
    ratio = context.ds("zero_optimization.offload_optimizer.ratio")
    if ratio and number(ratio.value) and ratio.value < 1 and stage != 3:
        yield Diagnostic(ratio, f"partial offload (ratio {ratio.value}) is supported only with ZeRO stage 3")
    norm = context.ds("zero_optimization.compute_grad_norm")
    if norm and norm.value is False and stage not in (1, 2):
        yield Diagnostic(norm, "compute_grad_norm: false is supported only with ZeRO stage 1 or 2", remove(norm))


@rule(
    "DS210",
    "error",
    source="deepspeed 0.19.8 runtime/zero/partition_parameters.py:1229 (assert), stage3.py:840",
    fails=ds(3, zero={"offload_param": {"device": "nvme"}}),
    passes=ds(3, zero={"offload_param": {"device": "nvme", "nvme_path": "/local_nvme"}}),
)
def nvme_without_path(context: LintContext) -> Iterator[Diagnostic]:
    """Offload to NVMe without nvme_path."""
    for section in ("offload_param", "offload_optimizer"):
        setting = context.ds(f"zero_optimization.{section}.device")
        if setting and setting.value == "nvme" and not context.deepspeed.get(f"zero_optimization.{section}.nvme_path"):
            yield Diagnostic(setting, f"{section} uses nvme, but nvme_path is not set: the engine fails at startup")


@rule(
    "DS213",
    "warning",
    source="deepspeed 0.19.8 runtime/zero/config.py:read_zero_config_deprecated",
    fails=ds(None, zero_optimization=True),
    passes=ds(1),
)
def zero_as_a_boolean(context: LintContext) -> Iterator[Diagnostic]:
    """zero_optimization is true or false.

    The form is deprecated: true means stage 1, false stage 0; accelerate cannot read it.
    """
    setting = context.ds("zero_optimization")
    if setting is not None and isinstance(setting.value, bool):
        yield Diagnostic(
            setting, f"a bare {str(setting.value).lower()} is deprecated: it means stage {int(setting.value)}"
        )


@rule(
    "DS217",
    "error",
    source="deepspeed 0.19.8 runtime/zero/config.py:ZeroStageEnum; offload_config.py:OffloadDeviceEnum",
    fails=ds(4),
    passes=ds(3, zero={"offload_param": {"device": "cpu"}}),
)
def no_such_choice(context: LintContext) -> Iterator[Diagnostic]:
    """A ZeRO stage or offload device that does not exist.

    Stages are 0, 1, 2 and 3; devices are none, cpu and nvme, in lower case.
    """
    stage = context.ds("zero_optimization.stage")
    if stage and stage.entry.node.entries is None and str(stage.value) not in ("0", "1", "2", "3", "auto"):
        yield Diagnostic(stage, f"ZeRO stage {stage.value!r} does not exist: 0, 1, 2 or 3")
    for section in ("offload_param", "offload_optimizer"):
        device = context.ds(f"zero_optimization.{section}.device")
        if device and device.value not in ("none", "cpu", "nvme", "auto"):
            near = nearest(str(device.value), ("none", "cpu", "nvme"), 0.6)
            yield Diagnostic(device, f"{device.value!r} is not none, cpu or nvme{meant(near)}")


@rule(
    "DS218",
    "warning",
    source="deepspeed 0.19.8 runtime/zero/config.py: offload_param «Valid only with stage "
    "3»; engine.py:_configure_zero_optimizer, zero_use_cpu_optimizer; ops/adam/cpu_adam.py:DeepSpeedCPUAdam.step",
    fails=ds(2, zero={"offload_param": {"device": "cpu"}}),
    passes=ds(3, zero={"offload_param": {"device": "cpu"}}),
)
def offload_without_stage(context: LintContext) -> Iterator[Diagnostic]:
    """Offload that this ZeRO stage cannot do.

    Parameters are offloaded by stage 3 only, optimizer states by stages 1 to 3. With stage 0 DeepSpeed takes its CPU
    optimizer all the same, and its first step rejects parameters that are on the GPU.
    """
    stage = context.deepspeed.get("zero_optimization.stage", 0)
    for section, needs in (("offload_param", (3,)), ("offload_optimizer", (1, 2, 3))):
        device = context.ds(f"zero_optimization.{section}.device")
        if device and device.value in ("cpu", "nvme") and stage in (0, 1, 2) and stage not in needs:
            text = f"{section} has no effect with ZeRO stage {stage}: it is for stage {needs[0]}"
            if stage == 0 and section == "offload_optimizer":
                text = (
                    f"{section} is for stages 1 to 3: in stage 0 DeepSpeed's CPU optimizer rejects weights on the GPU"
                )
            yield Diagnostic(device, text)


@rule(
    "DS219",
    "note",
    source="deepspeed 0.19.8 runtime/zero/config.py (fields that only stage3.py reads); accelerate 1.15.0 "
    "accelerator.py:get_state_dict (tp_sharding)",
    fails=ds(2, zero={"stage3_prefetch_bucket_size": 50000000}),
    passes=ds(3, zero={"stage3_prefetch_bucket_size": 50000000}),
)
def stage_3_keys(context: LintContext) -> Iterator[Diagnostic]:
    """Settings of ZeRO-3 under another stage: they have no effect.

    Of a model that AutoTP has divided, stage3_gather_16bit_weights_on_model_save gathers the weights under every stage.
    """
    stage = context.deepspeed.get("zero_optimization.stage", 0)
    if stage not in (0, 1, 2):
        return
    for key, entry in context.deepspeed.section("zero_optimization").items():
        if key == _GATHERED and autotp(context) > 1:
            continue  # the weights of AutoTP are gathered by it under every stage
        if key.startswith("stage3_"):
            setting = context.of(context.deepspeed, f"zero_optimization.{key}", entry)
            yield Diagnostic(setting, f"{key} has no effect with ZeRO stage {stage}", remove(setting))


@rule(
    "DS220",
    "note",
    source="measured: deepspeed 0.19.8 runtime/zero/linear.py (output += bias), torch 2.13.0 selective checkpointing; "
    "trl 1.16.0 models/selective_activation_checkpointing.py",
    fails=ds(3, zero={"stage3_gather_16bit_weights_on_model_save": True})
    | args(per_device_train_batch_size=2, gradient_checkpointing=True, gradient_checkpointing_kwargs=_SELECTIVE),
    passes=ds(3, zero={"stage3_gather_16bit_weights_on_model_save": True, "memory_efficient_linear": False})
    | args(per_device_train_batch_size=2, gradient_checkpointing=True, gradient_checkpointing_kwargs=_SELECTIVE),
)
def selective_under_zero_3(context: LintContext) -> Iterator[Diagnostic]:
    """Selective checkpointing under ZeRO-3: correct only if no matrix product is saved.

    ZeRO-3's own linear adds the bias in place to the product, and torch does not notice that the kept product has
    changed: recomputation adds the bias again, and gradients of models with biases (Qwen2, GPT-NeoX) are 1 to 4 % off
    while the loss is right. TRL's policy saves attention only, which is correct; a custom policy that saves
    matrix products is not, unless memory_efficient_linear is false.
    """
    if context.zero_stage != 3 or context.deepspeed.get("zero_optimization.memory_efficient_linear") is False:
        return
    for key in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
        setting = context.arg(f"{key}.selective")
        if setting is not None and true(setting.value):
            yield Diagnostic(
                setting,
                "correct only with TRL's own policy: if matrix products are saved, ZeRO-3 adds a bias "
                "twice in the recomputation; "
                "zero_optimization.memory_efficient_linear: false is right with any",
            )


@rule(
    "DS226",
    "note",
    source="measured: deepspeed 0.19.8 runtime/zero/stage_1_and_2.py:average_tensor (div_ before reduce_scatter)",
    fails=_THREE | ds(2, bf16={"enabled": True}, communication_data_type="fp32"),
    passes=_THREE | ds(2, bf16={"enabled": True}, communication_data_type="fp32", zero={"reduce_scatter": False}),
)
def divided_in_16_bits(context: LintContext) -> Iterator[Diagnostic]:
    """communication_data_type: fp32 does not keep ZeRO-2 from dividing gradients in 16 bits.

    With reduce_scatter, the default, each rank's gradient is divided by the number of ranks before it is cast to
    communication_data_type and added up. Two, four or eight ranks change the exponent alone. Three round every element
    once more: each gradient is 1.6e-3 off in bf16. Without reduce_scatter the sum is divided in fp32, and as much is
    sent.
    """
    processes, scatter = context.processes, context.ds("zero_optimization.reduce_scatter")
    if context.zero_stage != 2 or processes is None or processes.value < 1 or "deepspeed" not in context.kinds:
        return
    ranks, rest = divmod(processes.value, context.parallel_extra)
    half = next((key for key in ("bf16.enabled", "fp16.enabled") if true(context.deepspeed.get(key))), None)
    off = scatter is not None and not true(scatter.value)
    if context.deepspeed.get("communication_data_type") not in ("fp32", "float32", "torch.float32"):
        return  # the sum itself is rounded to 16 bits
    if rest or ranks & (ranks - 1) == 0 or half is None or off:
        return
    fix = set_value(scatter, False) if scatter else add(context.deepspeed, "zero_optimization", "reduce_scatter", False)
    yield Diagnostic(
        scatter or context.ds("zero_optimization.stage"),
        f"gradients are divided by {ranks} ranks in 16 bits before they are added up; reduce_scatter: false divides "
        "their sum, for the same traffic",
        fix,
    )
