"""DS2xx: values of the DeepSpeed JSON that contradict each other or fail in the engine."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.lint import keys
from toolkit.lint.edits import add, remove
from toolkit.lint.examples import ds
from toolkit.lint.model import Said
from toolkit.lint.near import meant, nearest
from toolkit.lint.registry import rule
from toolkit.lint.world import World, number, true

_OPTIMIZERS = ("adagrad", "adam", "adamw", "lamb", "muadam", "muadamw", "musgd", "lion", "muon")
_TORCH_OPTIMIZERS = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon", "NAdam", "RAdam",
    "RMSprop", "Rprop", "SGD", "SparseAdam",
)  # fmt: skip
_SCHEDULERS = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")


@rule(
    "DS201",
    "error",
    source="deepspeed 0.19.8 runtime/config.py:DeepSpeedConfig._initialize_params (assert)",
    fails=ds(fp16={"enabled": True}, bf16={"enabled": True}),
    passes=ds(fp16={"enabled": False}, bf16={"enabled": True}),
)
def two_precisions(world: World) -> Iterator[Said]:
    """fp16 and bf16 are both enabled."""
    half, brain = world.ds("fp16.enabled"), world.ds("bf16.enabled")
    if half and brain and true(half.value) and true(brain.value):
        yield Said(half, "fp16 and bf16 are both enabled: DeepSpeed asserts that only one is")


@rule(
    "DS202",
    "error",
    source="deepspeed 0.19.8 runtime/precision_config.py:_validate_dynamic_loss_scale_params",
    fails=ds(fp16={"enabled": True, "loss_scale_window": 0}),
    passes=ds(fp16={"enabled": True, "loss_scale_window": 1000}),
)
def loss_scale_cannot_move(world: World) -> Iterator[Said]:
    """Dynamic loss scaling with a window or a floor of zero.

    DeepSpeed refuses it where fp16 is enabled with loss_scale 0.
    """
    if not true(world.deepspeed.get("fp16.enabled")) or world.deepspeed.get("fp16.loss_scale", 0) != 0:
        return
    for key in ("loss_scale_window", "min_loss_scale"):
        setting = world.ds(f"fp16.{key}")
        if setting is not None and number(setting.value) and setting.value <= 0:
            yield Said(setting, f"{key} must be above 0 where the loss scale is dynamic")


@rule(
    "DS203",
    "error",
    source="deepspeed 0.19.8 runtime/config.py:_do_error_check",
    fails=ds(3, gradient_allreduce_op="sum"),
    passes=ds(2, gradient_allreduce_op="sum"),
)
def sum_under_stage_3(world: World) -> Iterator[Said]:
    """Gradients are to be summed under ZeRO-3.

    `gradient_allreduce_op: sum` is refused with stage 3; with mean, divide by the tokens yourself.
    """
    setting = world.ds("gradient_allreduce_op")
    if (
        setting
        and str(setting.value).lower() == "sum"
        and world.deepspeed.get("zero_optimization.stage") == 3
    ):
        yield Said(setting, "gradient_allreduce_op sum is not supported with ZeRO stage 3")


@rule(
    "DS204",
    "error",
    source="deepspeed 0.19.8 runtime/config.py:_do_error_check",
    fails=ds(bf16={"enabled": True, "bf16_optimizer_states": True}),
    passes=ds(bf16={"enabled": True, "bf16_optimizer_states": True, "bf16_master_weights_and_grads": True}),
)
def bf16_states_alone(world: World) -> Iterator[Said]:
    """16-bit optimizer states or master weights without what they need.

    bf16_optimizer_states needs bf16_master_weights_and_grads, and both need ZeRO 1, 2 or 3.
    """
    states, master = (
        world.ds(f"bf16.{k}") for k in ("bf16_optimizer_states", "bf16_master_weights_and_grads")
    )
    if states and true(states.value) and not (master and true(master.value)):
        fix = add(world.deepspeed, "bf16", "bf16_master_weights_and_grads", True) if master is None else None
        yield Said(states, "bf16_optimizer_states requires bf16_master_weights_and_grads", fix)
    for setting in (states, master, world.ds("fp16.fp16_master_weights_and_grads")):
        if setting and true(setting.value) and world.deepspeed.get("zero_optimization.stage", 0) in (0, "0"):
            yield Said(setting, f"{setting.name} is supported only with ZeRO stage 1, 2 or 3")


@rule(
    "DS205",
    "error",
    source="deepspeed 0.19.8 runtime/zero/config.py:offload_ratio_check, compute_grad_norm_valid",
    fails=ds(zero={"offload_optimizer": {"device": "cpu", "ratio": 0.5}}),
    passes=ds(3, zero={"offload_optimizer": {"device": "cpu", "ratio": 0.5}}),
)
def wrong_stage(world: World) -> Iterator[Said]:
    """A ZeRO setting that this stage refuses.

    Partial offload (ratio below 1) is for stage 3; compute_grad_norm: false for stages 1 and 2.
    """
    stage = world.deepspeed.get("zero_optimization.stage", 0)
    ratio = world.ds("zero_optimization.offload_optimizer.ratio")
    if ratio and number(ratio.value) and ratio.value < 1 and stage != 3:
        yield Said(ratio, f"partial offload (ratio {ratio.value}) is supported only with ZeRO stage 3")
    norm = world.ds("zero_optimization.compute_grad_norm")
    if norm and norm.value is False and stage not in (1, 2):
        yield Said(norm, "compute_grad_norm: false is supported only with ZeRO stage 1 or 2", remove(norm))


@rule(
    "DS206",
    "error",
    source="accelerate 1.15.0 utils/dataclasses.py:DeepSpeedPlugin.__post_init__ (ValueError)",
    fails=ds(None)
    | {
        "accelerate.yaml": "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  "
        "deepspeed_config_file: ds.json\n"
    },
    passes=ds(0)
    | {
        "accelerate.yaml": "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  "
        "deepspeed_config_file: ds.json\n"
    },
)
def no_zero_section(world: World) -> Iterator[Said]:
    """No zero_optimization section, read by accelerate or the Trainer.

    DeepSpeed alone runs stage 0 then; accelerate's plugin raises a ValueError, and the Trainer goes through it.
    """
    if "deepspeed" not in world.kinds or world.ds("zero_optimization") is not None:
        return
    if world.reader in ("trainer", "accelerator") or "accelerate" in world.kinds:
        fix = add(world.deepspeed, "", "zero_optimization", {"stage": 0})
        yield world.at_file(
            world.deepspeed,
            "no zero_optimization section: accelerate refuses the file",
            "zero_optimization",
            fix=fix,
        )


@rule(
    "DS207",
    "error",
    source="deepspeed 0.19.8 runtime/config.py:_set_batch_related_parameters (assert)",
    fails=ds(train_micro_batch_size_per_gpu=None),
    passes=ds(),
)
def no_batch_size(world: World) -> Iterator[Said]:
    """Neither train_batch_size nor train_micro_batch_size_per_gpu.

    DeepSpeed asserts that one of them is there; accelerate and the Trainer fill them only where they are "auto".
    """
    if "deepspeed" in world.kinds and not any(
        world.ds(key) for key in ("train_batch_size", "train_micro_batch_size_per_gpu")
    ):
        fix = None
        if world.reader == "trainer":
            fix = add(world.deepspeed, "", "train_micro_batch_size_per_gpu", "auto")
        message = "neither train_batch_size nor train_micro_batch_size_per_gpu: DeepSpeed needs one of them"
        yield world.at_file(world.deepspeed, message, "train_micro_batch_size_per_gpu", fix=fix)


@rule(
    "DS208",
    "error",
    source="deepspeed 0.19.8 runtime/config.py:get_communication_data_type",
    fails=ds(communication_data_type="bfloat16"),
    passes=ds(communication_data_type="bf16"),
)
def communication_type(world: World) -> Iterator[Said]:
    """A communication data type that DeepSpeed does not know: it takes fp16, bf16 or fp32."""
    for key in ("communication_data_type", "seq_parallel_communication_data_type"):
        setting = world.ds(key)
        if (
            setting
            and setting.value is not None
            and str(setting.value).lower() not in ("fp16", "bf16", "fp32", "auto")
        ):
            yield Said(setting, f"{setting.value!r} is not fp16, bf16 or fp32")


@rule(
    "DS209",
    "warning",
    source="deepspeed 0.19.8 runtime/config.py:_do_warning_check",
    fails=ds(optimizer={"type": "AdamW", "params": {"lr": 1e-4, "max_grad_norm": 0.5}}),
    passes=ds(optimizer={"type": "AdamW", "params": {"lr": 1e-4}}),
)
def clipping_in_the_optimizer(world: World) -> Iterator[Said]:
    """max_grad_norm stands among the optimizer's parameters.

    DeepSpeed warns that it is not supported there: gradient_clipping at the top level is.
    """
    setting = world.ds("optimizer.params.max_grad_norm")
    if setting is not None:
        yield Said(
            setting, "max_grad_norm has no effect here: gradient_clipping at the top level is what clips"
        )


@rule(
    "DS210",
    "error",
    source="deepspeed 0.19.8 runtime/zero/partition_parameters.py:1229 (assert), stage3.py:840",
    fails=ds(3, zero={"offload_param": {"device": "nvme"}}),
    passes=ds(3, zero={"offload_param": {"device": "nvme", "nvme_path": "/local_nvme"}}),
)
def nvme_without_path(world: World) -> Iterator[Said]:
    """Offload to NVMe without nvme_path."""
    for section in ("offload_param", "offload_optimizer"):
        setting = world.ds(f"zero_optimization.{section}.device")
        if (
            setting
            and setting.value == "nvme"
            and not world.deepspeed.get(f"zero_optimization.{section}.nvme_path")
        ):
            yield Said(
                setting, f"{section} goes to nvme, but nvme_path is not set: the engine fails when it starts"
            )


@rule(
    "DS211",
    "note",
    source="deepspeed 0.19.8 runtime/constants.py:GRADIENT_CLIPPING_DEFAULT = 1.0",
    fails=ds(gradient_clipping=None),
    passes=ds(gradient_clipping=0.0),
)
def clipping_nobody_set(world: World) -> Iterator[Said]:
    """gradient_clipping is not written, and its default clips.

    DeepSpeed clips at 1.0 where nothing is written. Write 1.0 if that is meant, 0.0 for no clipping.
    """
    if "deepspeed" not in world.kinds or world.arg("max_grad_norm") is not None:
        return
    if nearest("gradient_clipping", world.deepspeed.section("")) is None:
        fix = add(world.deepspeed, "", "gradient_clipping", 1.0)
        message = "gradient_clipping is not written: DeepSpeed clips at its default, 1.0"
        yield world.at_file(world.deepspeed, message, "gradient_clipping", fix=fix)


@rule(
    "DS213",
    "warning",
    source="deepspeed 0.19.8 runtime/zero/config.py:read_zero_config_deprecated",
    fails=ds(None, zero_optimization=True),
    passes=ds(1),
)
def zero_as_a_boolean(world: World) -> Iterator[Said]:
    """zero_optimization is true or false.

    The form is deprecated: true means stage 1, false stage 0; accelerate cannot read it.
    """
    setting = world.ds("zero_optimization")
    if setting is not None and isinstance(setting.value, bool):
        yield Said(
            setting, f"a bare {str(setting.value).lower()} is deprecated: it means stage {int(setting.value)}"
        )


@rule(
    "DS214",
    "error",
    source="deepspeed 0.19.8 runtime/engine.py:2300 (assert) and zero/utils.py:is_zero_supported_optimizer",
    reader="deepspeed",
    fails=ds(optimizer={"type": "SGD", "params": {"lr": 0.1}}),
    passes=ds(optimizer={"type": "SGD", "params": {"lr": 0.1}}, zero_allow_untested_optimizer=True),
)
def untested_optimizer(world: World) -> Iterator[Said]:
    """An optimizer that ZeRO was not tested with.

    The engine asserts zero_allow_untested_optimizer for every optimizer but its own and Adam's kin.
    """
    setting = world.ds("optimizer.type")
    if setting is None or world.deepspeed.get("zero_optimization.stage", 0) in (0, "0"):
        return
    untested = str(setting.value) in _TORCH_OPTIMIZERS and str(setting.value).lower() not in _OPTIMIZERS
    if untested and not true(world.deepspeed.get("zero_allow_untested_optimizer")):
        fix = add(world.deepspeed, "", "zero_allow_untested_optimizer", True)
        yield Said(
            setting,
            f"{setting.value} is untested with ZeRO: the engine asks for zero_allow_untested_optimizer",
            fix,
        )


@rule(
    "DS215",
    "error",
    source="deepspeed 0.19.8 runtime/engine.py:_configure_basic_optimizer, is_supported_optimizer",
    fails=ds(optimizer={"type": "OneBitAdam", "params": {"lr": 1e-4}}),
    passes=ds(optimizer={"type": "AdamW", "params": {"lr": 1e-4}}),
)
def unknown_optimizer(world: World) -> Iterator[Said]:
    """An optimizer that neither DeepSpeed nor torch has."""
    setting = world.ds("optimizer.type")
    known = [*_OPTIMIZERS, *_TORCH_OPTIMIZERS]
    if (
        setting
        and isinstance(setting.value, str)
        and setting.value.lower() not in _OPTIMIZERS
        and setting.value not in known
    ):
        yield Said(
            setting,
            f"no optimizer {setting.value!r} in DeepSpeed 0.19.8 or "
            f"torch{meant(nearest(setting.value, known))}",
        )


@rule(
    "DS216",
    "error",
    source="deepspeed 0.19.8 runtime/lr_schedules.py and runtime/engine.py:_scheduler_from_config",
    fails=ds(scheduler={"type": "WarmupLR", "params": {"total_num_steps": 100}}),
    passes=ds(scheduler={"type": "WarmupDecayLR", "params": {"total_num_steps": 100}}),
)
def scheduler_parameter(world: World) -> Iterator[Said]:
    """A parameter that this DeepSpeed scheduler does not take.

    The parameters go to the scheduler's constructor as they are: it raises a TypeError.
    """
    kind = world.deepspeed.get("scheduler.type")
    if kind not in _SCHEDULERS:
        return
    facts = keys.package("deepspeed")["sections"]["scheduler.params"]
    takes = [key for key, fact in facts.items() if kind in fact["schedulers"]]
    for key in world.deepspeed.section("scheduler.params"):
        if key not in takes and not key.startswith("//"):
            setting = world.ds(f"scheduler.params.{key}")
            yield Said(setting, f'{kind} takes no "{key}"{meant(nearest(key, takes))}')


@rule(
    "DS217",
    "error",
    source="deepspeed 0.19.8 runtime/zero/config.py:ZeroStageEnum; offload_config.py:OffloadDeviceEnum",
    fails=ds(4),
    passes=ds(3, zero={"offload_param": {"device": "cpu"}}),
)
def no_such_choice(world: World) -> Iterator[Said]:
    """A ZeRO stage or offload device that does not exist.

    Stages are 0, 1, 2 and 3; devices are none, cpu and nvme, in lower case.
    """
    stage = world.ds("zero_optimization.stage")
    if stage and stage.entry.node.entries is None and str(stage.value) not in ("0", "1", "2", "3", "auto"):
        yield Said(stage, f"ZeRO stage {stage.value!r} does not exist: 0, 1, 2 or 3")
    for section in ("offload_param", "offload_optimizer"):
        device = world.ds(f"zero_optimization.{section}.device")
        if device and device.value not in ("none", "cpu", "nvme", "auto"):
            near = nearest(str(device.value), ("none", "cpu", "nvme"), 0.6)
            yield Said(device, f"{device.value!r} is not none, cpu or nvme{meant(near)}")


@rule(
    "DS218",
    "warning",
    source="deepspeed 0.19.8 runtime/zero/config.py: offload_param «Valid only with stage "
    "3»; engine.py:_configure_zero_optimizer",
    fails=ds(2, zero={"offload_param": {"device": "cpu"}}),
    passes=ds(3, zero={"offload_param": {"device": "cpu"}}),
)
def offload_without_stage(world: World) -> Iterator[Said]:
    """Offload that this ZeRO stage cannot do.

    Parameters are offloaded by stage 3 only, optimizer states by stages 1 to 3.
    """
    stage = world.deepspeed.get("zero_optimization.stage", 0)
    for section, needs in (("offload_param", (3,)), ("offload_optimizer", (1, 2, 3))):
        device = world.ds(f"zero_optimization.{section}.device")
        if device and device.value in ("cpu", "nvme") and stage in (0, 1, 2) and stage not in needs:
            yield Said(device, f"{section} has no effect with ZeRO stage {stage}: it is for stage {needs[0]}")


@rule(
    "DS219",
    "note",
    source="deepspeed 0.19.8 runtime/zero/config.py (fields that only stage3.py reads)",
    fails=ds(2, zero={"stage3_prefetch_bucket_size": 50000000}),
    passes=ds(3, zero={"stage3_prefetch_bucket_size": 50000000}),
)
def stage_3_keys(world: World) -> Iterator[Said]:
    """Settings of ZeRO-3 under another stage: they have no effect."""
    stage = world.deepspeed.get("zero_optimization.stage", 0)
    if stage not in (0, 1, 2):
        return
    for key, entry in world.deepspeed.section("zero_optimization").items():
        if key.startswith("stage3_"):
            setting = world.of(world.deepspeed, f"zero_optimization.{key}", entry)
            yield Said(setting, f"{key} has no effect with ZeRO stage {stage}", remove(setting))
