"""DS2xx: precision, batch size and clipping of the DeepSpeed JSON."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.linting.context import LintContext, number, true
from toolkit.linting.edits import add
from toolkit.linting.examples import ds
from toolkit.linting.model import Diagnostic, Severity
from toolkit.linting.near import nearest
from toolkit.linting.registry import rule


def _fragment(context: LintContext) -> bool:
    """The ZeRO section alone, read by nothing known: some program merges it with the rest."""
    return context.reader is None and list(context.deepspeed.section("")) == ["zero_optimization"]


@rule(
    "DS201",
    "error",
    source="deepspeed 0.19.8 runtime/config.py:DeepSpeedConfig._initialize_params (assert)",
    fails=ds(fp16={"enabled": True}, bf16={"enabled": True}),
    passes=ds(fp16={"enabled": False}, bf16={"enabled": True}),
)
def two_precisions(context: LintContext) -> Iterator[Diagnostic]:
    """fp16 and bf16 are both enabled."""
    half, brain = context.ds("fp16.enabled"), context.ds("bf16.enabled")
    if half and brain and true(half.value) and true(brain.value):
        yield Diagnostic(half, "fp16 and bf16 are both enabled: DeepSpeed asserts that only one is")


@rule(
    "DS202",
    "error",
    source="deepspeed 0.19.8 runtime/precision_config.py:_validate_dynamic_loss_scale_params",
    fails=ds(fp16={"enabled": True, "loss_scale_window": 0}),
    passes=ds(fp16={"enabled": True, "loss_scale_window": 1000}),
)
def loss_scale_cannot_move(context: LintContext) -> Iterator[Diagnostic]:
    """Dynamic loss scaling with a window or a floor of zero.

    DeepSpeed rejects it where fp16 is enabled with loss_scale 0.
    """
    if not true(context.deepspeed.get("fp16.enabled")) or context.deepspeed.get("fp16.loss_scale", 0) != 0:
        return
    for key in ("loss_scale_window", "min_loss_scale"):
        setting = context.ds(f"fp16.{key}")
        if setting is not None and number(setting.value) and setting.value <= 0:
            yield Diagnostic(setting, f"{key} must be above 0 if the loss scale is dynamic")


@rule(
    "DS203",
    "error",
    source="deepspeed 0.19.8 runtime/config.py:_do_error_check",
    fails=ds(3, gradient_allreduce_op="sum"),
    passes=ds(2, gradient_allreduce_op="sum"),
)
def sum_under_stage_3(context: LintContext) -> Iterator[Diagnostic]:
    """Gradients are to be summed under ZeRO-3.

    `gradient_allreduce_op: sum` is rejected with stage 3; with mean, divide by the tokens yourself.
    """
    setting = context.ds("gradient_allreduce_op")
    if setting and str(setting.value).lower() == "sum" and context.deepspeed.get("zero_optimization.stage") == 3:
        yield Diagnostic(setting, "gradient_allreduce_op sum is not supported with ZeRO stage 3")


@rule(
    "DS204",
    "error",
    source="deepspeed 0.19.8 runtime/config.py:_do_error_check",
    fails=ds(bf16={"enabled": True, "bf16_optimizer_states": True}),
    passes=ds(bf16={"enabled": True, "bf16_optimizer_states": True, "bf16_master_weights_and_grads": True}),
)
def bf16_states_alone(context: LintContext) -> Iterator[Diagnostic]:
    """16-bit optimizer states or master weights without what they need.

    bf16_optimizer_states needs bf16_master_weights_and_grads, and both need ZeRO 1, 2 or 3.
    """
    states, master = (context.ds(f"bf16.{k}") for k in ("bf16_optimizer_states", "bf16_master_weights_and_grads"))
    if states and true(states.value) and not (master and true(master.value)):
        fix = add(context.deepspeed, "bf16", "bf16_master_weights_and_grads", True) if master is None else None
        yield Diagnostic(states, "bf16_optimizer_states requires bf16_master_weights_and_grads", fix)
    for setting in (states, master, context.ds("fp16.fp16_master_weights_and_grads")):
        if setting and true(setting.value) and context.deepspeed.get("zero_optimization.stage", 0) in (0, "0"):
            yield Diagnostic(setting, f"{setting.name} is supported only with ZeRO stage 1, 2 or 3")


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
def no_zero_section(context: LintContext) -> Iterator[Diagnostic]:
    """No zero_optimization section, read by accelerate or the Trainer.

    DeepSpeed alone runs stage 0 then; accelerate's plugin raises a ValueError, and the Trainer goes through
    it.
    """
    if "deepspeed" not in context.kinds or context.ds("zero_optimization") is not None:
        return
    if context.launch.has("autotuning") or true(context.deepspeed.get("autotuning.enabled")):
        return  # the tuner writes configs of its own, with the section
    if context.reader in ("trainer", "accelerator") or "accelerate" in context.kinds:
        fix = add(context.deepspeed, "", "zero_optimization", {"stage": 0})
        yield context.at_file(
            context.deepspeed,
            "no zero_optimization section: accelerate rejects the file",
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
def no_batch_size(context: LintContext) -> Iterator[Diagnostic]:
    """Neither train_batch_size nor train_micro_batch_size_per_gpu.

    DeepSpeed asserts that one of them is there; accelerate and the Trainer fill them only where they are
    "auto".
    """
    if "deepspeed" in context.kinds and not any(
        context.ds(key) for key in ("train_batch_size", "train_micro_batch_size_per_gpu")
    ):
        fix = None
        if context.reader == "trainer":
            fix = add(context.deepspeed, "", "train_micro_batch_size_per_gpu", "auto")
        message = "neither train_batch_size nor train_micro_batch_size_per_gpu: DeepSpeed needs one of them"
        severity: Severity | None = "note" if _fragment(context) else None
        yield context.at_file(context.deepspeed, message, "train_micro_batch_size_per_gpu", fix=fix, severity=severity)


@rule(
    "DS208",
    "error",
    source="deepspeed 0.19.8 runtime/config.py:get_communication_data_type",
    fails=ds(communication_data_type="bfloat16"),
    passes=ds(communication_data_type="bf16"),
)
def communication_type(context: LintContext) -> Iterator[Diagnostic]:
    """A communication data type that DeepSpeed does not know: it takes fp16, bf16 or fp32."""
    for key in ("communication_data_type", "seq_parallel_communication_data_type"):
        setting = context.ds(key)
        if setting and setting.value is not None and str(setting.value).lower() not in ("fp16", "bf16", "fp32", "auto"):
            yield Diagnostic(setting, f"{setting.value!r} is not fp16, bf16 or fp32")


@rule(
    "DS209",
    "error",
    source="deepspeed 0.19.8 runtime/engine.py:_configure_basic_optimizer (ValueError)",
    fails=ds(optimizer={"type": "AdamW", "params": {"lr": 1e-4, "max_grad_norm": 0.5}}),
    passes=ds(optimizer={"type": "AdamW", "params": {"lr": 1e-4}}),
)
def clipping_in_the_optimizer(context: LintContext) -> Iterator[Diagnostic]:
    """max_grad_norm is set in the optimizer's parameters.

    The engine raises a ValueError before it makes the optimizer: gradient_clipping at the top level clips.
    """
    setting = context.ds("optimizer.params.max_grad_norm")
    if setting is not None:
        yield Diagnostic(setting, "DeepSpeed rejects max_grad_norm here: use gradient_clipping at the top level")


@rule(
    "DS211",
    "note",
    source="deepspeed 0.19.8 runtime/constants.py:GRADIENT_CLIPPING_DEFAULT = 1.0",
    fails=ds(gradient_clipping=None),
    passes=ds(gradient_clipping=0.0),
)
def clipping_nobody_set(context: LintContext) -> Iterator[Diagnostic]:
    """gradient_clipping is not set, and its default clips.

    DeepSpeed clips at 1.0 where nothing is written. Set 1.0 to keep this, or 0.0 to disable clipping.
    """
    if "deepspeed" not in context.kinds or context.arg("max_grad_norm") is not None or _fragment(context):
        return
    if nearest("gradient_clipping", context.deepspeed.section("")) is None:
        fix = add(context.deepspeed, "", "gradient_clipping", 1.0)
        message = "gradient_clipping is not set: DeepSpeed clips at its default, 1.0"
        yield context.at_file(context.deepspeed, message, "gradient_clipping", fix=fix)
