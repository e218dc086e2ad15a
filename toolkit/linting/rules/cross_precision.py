"""XL20x: mixed precision in two layers, with two values."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.linting.context import LintContext, true
from toolkit.linting.edits import add, set_value
from toolkit.linting.examples import args, ds, multi_gpu, zero
from toolkit.linting.model import Diagnostic
from toolkit.linting.registry import rule

_TRAINER = "transformers 5.23.0 integrations/deepspeed.py:trainer_config_process, _finalize (ValueError)"
_FILE = ("deepspeed_config_file: ds.json",)


@rule(
    "XL201",
    "error",
    source="transformers 5.23.0 training_args.py:__post_init__ (step 5, mixed precision)",
    fails=multi_gpu() | args(bf16=False),
    passes=multi_gpu() | args(bf16=True),
)
def precision_of_yaml_and_arguments(context: LintContext) -> Iterator[Diagnostic]:
    """The accelerate config and the training arguments differ in mixed precision.

    A true argument wins over the accelerate config; a false one does not, and the accelerate config wins.
    """
    launch = context.precision
    if launch is None or not context.trainer_run:
        return
    there = str(launch.value).lower() if launch.value is not False else "no"
    for name in ("bf16", "fp16"):
        setting = context.arg(name)
        if setting is None or not isinstance(setting.value, bool):
            continue
        if setting.value and there != name and there in ("bf16", "fp16", "no"):
            yield Diagnostic(
                setting,
                f"{name} wins over mixed_precision {there} in {launch.place.file}:{launch.place.line}",
            )
        elif not setting.value and there == name and context.distributed_type != "DEEPSPEED":  # XL217 there
            yield Diagnostic(
                setting, f"{name} is false here but has no effect: mixed_precision {there} in "
                f"{launch.place.file}:{launch.place.line} wins", set_value(setting, True),
            )  # fmt: skip


@rule(
    "XL202",
    "error",
    source="accelerate 1.15.0 utils/dataclasses.py:DeepSpeedPlugin.set_mixed_precision",
    fails=zero(*_FILE, top=())
    | ds(fp16={"enabled": True})
    | {"launch.sh": "accelerate launch --config_file accelerate.yaml --mixed_precision bf16 train.py\n"},
    passes=zero(*_FILE, top=())
    | ds(bf16={"enabled": "auto"})
    | {"launch.sh": "accelerate launch --config_file accelerate.yaml --mixed_precision bf16 train.py\n"},
)
def precision_of_yaml_and_deepspeed(context: LintContext) -> Iterator[Diagnostic]:
    """The accelerate layer and the DeepSpeed JSON differ in precision.

    The other precision enabled in the JSON is a ValueError; the same one disabled there silently wins,
    and the run is in fp32.
    """
    launch = context.precision
    if launch is None or str(launch.value) not in ("bf16", "fp16"):
        return
    mine, other = (str(launch.value), "fp16" if launch.value == "bf16" else "bf16")
    enabled = context.ds(f"{other}.enabled")
    if enabled and true(enabled.value):
        yield Diagnostic(
            enabled,
            f"{other} is enabled here, mixed_precision is {launch.described}: accelerate rejects this",
        )
    disabled = context.ds(f"{mine}.enabled")
    if disabled and disabled.value is False:
        yield Diagnostic(
            disabled, f"{mine} is off here and wins over mixed_precision {launch.described}: the run is in fp32"
        )


@rule(
    "XL203",
    "error",
    source=_TRAINER,
    fails=ds(bf16={"enabled": True}) | args(fp16=True, per_device_train_batch_size=2),
    passes=ds(bf16={"enabled": True}) | args(bf16=True, per_device_train_batch_size=2),
)
def precision_of_deepspeed_and_arguments(context: LintContext) -> Iterator[Diagnostic]:
    """The DeepSpeed JSON and the training arguments differ in precision: the Trainer rejects this.

    An argument that is not set counts as false.
    """
    if not context.trainer_run:
        return
    for name in ("fp16", "bf16"):
        setting = context.ds(f"{name}.enabled")
        if setting is None or not isinstance(setting.value, bool):
            continue
        if name == "bf16" and context.args.tool == "trl" and context.arg_true("fp16"):
            pass  # TRL: bf16 is on unless fp16 is
        elif context.arg_unsure(name) or context.args.unsure(f"{name}_full_eval"):
            continue
        asked = context.arg_true(name) or context.arg_true(f"{name}_full_eval")
        if setting.value != asked:
            fix = set_value(setting, "auto")
            shown = f"{name} is {str(asked).lower()} in the training arguments"
            yield Diagnostic(setting, f"{str(setting.value).lower()} here, {shown}: the Trainer rejects this", fix)


@rule(
    "XL217",
    "error",
    source="transformers 5.23.0 training_args.py:__post_init__ (set_mixed_precision) and " + _TRAINER,
    fails=zero("zero_stage: 2") | args(per_device_train_batch_size=2),
    passes=zero("zero_stage: 2") | args(per_device_train_batch_size=2, bf16=True),
)
def precision_only_in_the_yaml(context: LintContext) -> Iterator[Diagnostic]:
    """mixed_precision is set for a DeepSpeed launch, but not in the training arguments.

    accelerate enables it in the DeepSpeed config first; then the Trainer compares that with bf16 and fp16
    of its own, which count as false if they are not set, and rejects the run once the model is
    loaded. Without DeepSpeed the accelerate config alone is enough.
    """
    launch = context.precision
    if launch is None or str(launch.value) not in ("bf16", "fp16") or not context.trainer_run:
        return
    if context.distributed_type != "DEEPSPEED" or context.arg_true("deepspeed"):
        return
    name = str(launch.value)
    if any(context.arg_unsure(key) for key in ("bf16", "fp16", f"{name}_full_eval", "deepspeed")):
        return
    if "deepspeed" in context.kinds and context.deepspeed.get(f"{name}.enabled", "auto") != "auto":
        return  # XL203 compares the JSON
    if not (context.arg_true("bf16") or context.arg_true("fp16") or context.arg_true(f"{name}_full_eval")):
        written = context.arg(name)
        fix = set_value(written, True) if written else add(context.args, "", name, True)
        message = f"{name} only here: under DeepSpeed the Trainer needs {name}: true in its arguments too"
        yield Diagnostic(launch, message, fix)
