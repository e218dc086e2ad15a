"""XL2xx: accumulation, batch, clipping and optimizer values that differ between the layers."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.linting.context import LintContext, number, same
from toolkit.linting.edits import add, set_value
from toolkit.linting.examples import args, ds, multi_gpu, zero
from toolkit.linting.model import Diagnostic
from toolkit.linting.registry import rule

_TRAINER = "transformers 5.23.0 integrations/deepspeed.py:trainer_config_process, _finalize (ValueError)"


UNKNOWN = object()  # of an argument whose value the files do not say


def _differs(value: object, argument: object) -> bool:
    return argument is not UNKNOWN and not same(value, argument)


def _argument(context: LintContext, key: str, default: object) -> tuple[object, str]:
    """A training argument's value and where it is from; its default counts, for the Trainer compares that."""
    setting = context.arg(key)
    if setting is not None and setting.value is not None:
        return setting.value, setting.described
    if context.arg_unsure(key):
        return UNKNOWN, "not known"
    return default, f"{default} by default in the training arguments"


@rule(
    "XL204",
    "error",
    source=_TRAINER + "; accelerate 1.15.0 accelerator.py:_prepare_deepspeed",
    fails=zero("zero_stage: 2", "gradient_accumulation_steps: 1") | args(gradient_accumulation_steps=4),
    passes=zero("zero_stage: 2", "gradient_accumulation_steps: 4") | args(gradient_accumulation_steps=4, bf16=True),
)
def accumulation(context: LintContext) -> Iterator[Diagnostic]:
    """gradient_accumulation_steps differs between the layers.

    The Trainer raises a ValueError after the model is loaded. A bare Accelerator warns and takes DeepSpeed's.
    """
    for setting in (
        context.acc("deepspeed_config.gradient_accumulation_steps"),
        context.ds("gradient_accumulation_steps"),
    ):
        if setting is None or not number(setting.value) or not context.trainer_run:
            continue
        steps, where = _argument(context, "gradient_accumulation_steps", 1)
        if _differs(setting.value, steps):
            message = f"{setting.name} is {setting.value} here, {where}: the Trainer rejects this at startup"
            yield Diagnostic(setting, message, set_value(setting, steps))


@rule(
    "XL205",
    "error",
    source=_TRAINER,
    fails=ds() | args(per_device_train_batch_size=4),
    passes=ds() | args(per_device_train_batch_size=2),
)
def micro_batch(context: LintContext) -> Iterator[Diagnostic]:
    """The micro-batch of the DeepSpeed JSON is not the Trainer's.

    per_device_train_batch_size counts with its default, 8, if it is not set.
    """
    setting = context.ds("train_micro_batch_size_per_gpu")
    if (
        setting is None
        or not number(setting.value)
        or not context.trainer_run
        or context.arg_true("auto_find_batch_size")
    ):
        return
    size, where = _argument(context, "per_device_train_batch_size", 8)
    if _differs(setting.value, size):
        yield Diagnostic(
            setting,
            f"{setting.value} here, per_device_train_batch_size {where}: the Trainer rejects this",
            set_value(setting, "auto"),
        )


@rule(
    "XL206",
    "error",
    source=_TRAINER,
    fails=ds(train_batch_size=32) | args(per_device_train_batch_size=2, gradient_accumulation_steps=4) | multi_gpu(),
    passes=ds(train_batch_size=16) | args(per_device_train_batch_size=2, gradient_accumulation_steps=4),
)
def global_batch(context: LintContext) -> Iterator[Diagnostic]:
    """train_batch_size is not processes × micro-batch × accumulation.

    The Trainer counts all processes, also those that divide layers (AutoTP) or rows and train on the same samples.
    """
    setting, processes = context.ds("train_batch_size"), context.processes
    if setting is None or not number(setting.value) or processes is None or not context.trainer_run:
        return
    micro, steps = (
        _argument(context, "per_device_train_batch_size", 8)[0],
        _argument(context, "gradient_accumulation_steps", 1)[0],
    )
    if not isinstance(micro, int) or not isinstance(steps, int):
        return
    total = processes.value * micro * steps
    if setting.value != total:
        message = f"{setting.value} here, but {processes.value} processes × {micro} × {steps} accumulated = {total}"
        yield Diagnostic(setting, message, set_value(setting, "auto"))


@rule(
    "XL207",
    "error",
    source=_TRAINER,
    fails=ds(gradient_clipping=0.5) | args(max_grad_norm=1.0, per_device_train_batch_size=2),
    passes=ds(gradient_clipping="auto") | args(max_grad_norm=0.5, per_device_train_batch_size=2),
)
def clipping(context: LintContext) -> Iterator[Diagnostic]:
    """Gradient clipping differs between the layers: the Trainer rejects this.

    max_grad_norm counts with its default, 1.0, if it is not set.
    """
    for setting in (context.ds("gradient_clipping"), context.acc("deepspeed_config.gradient_clipping")):
        if setting is None or not number(setting.value) or not context.trainer_run:
            continue
        norm, where = _argument(context, "max_grad_norm", 1.0)
        if _differs(setting.value, norm):
            yield Diagnostic(
                setting,
                f"gradient_clipping is {setting.value} here, max_grad_norm {where}: the Trainer rejects this",
                set_value(setting, "auto"),
            )


@rule(
    "XL208",
    "error",
    source='transformers 5.23.0 integrations/deepspeed.py:fill_match (only an "auto" is '
    "filled); deepspeed constants.py",
    fails=ds(gradient_clipping=None) | args(max_grad_norm=0.3, per_device_train_batch_size=2),
    passes=ds(gradient_clipping="auto") | args(max_grad_norm=0.3, per_device_train_batch_size=2),
)
def clipping_is_ignored(context: LintContext) -> Iterator[Diagnostic]:
    """max_grad_norm has no effect: the DeepSpeed JSON has no gradient_clipping.

    DeepSpeed clips by its own config alone, at its default of 1.0 where nothing is written; the Trainer
    fills the key only if it is "auto" there.
    """
    norm = context.arg("max_grad_norm")
    if (
        norm is None
        or "deepspeed" not in context.kinds
        or context.ds("gradient_clipping") is not None
        or same(norm.value, 1.0)
    ):
        return
    fix = add(context.deepspeed, "", "gradient_clipping", "auto")
    yield Diagnostic(
        norm,
        f"max_grad_norm {norm.value} has no effect: {context.deepspeed.path} has no "
        "gradient_clipping, and DeepSpeed clips at 1.0",
        fix,
    )


@rule(
    "XL209",
    "error",
    source=_TRAINER,
    fails=ds(optimizer={"type": "AdamW", "params": {"lr": 1e-4}})
    | args(learning_rate=2e-4, per_device_train_batch_size=2),
    passes=ds(optimizer={"type": "AdamW", "params": {"lr": "auto"}})
    | args(learning_rate=2e-4, per_device_train_batch_size=2),
)
def optimizer_values(context: LintContext) -> Iterator[Diagnostic]:
    """An optimizer value of the DeepSpeed JSON is not the Trainer's.

    The defaults of the training arguments count: learning_rate 5e-5, weight_decay 0, betas 0.9 and 0.999.
    """
    if not context.trainer_run:
        return
    betas = [_argument(context, "adam_beta1", 0.9)[0], _argument(context, "adam_beta2", 0.999)[0]]
    for key, value in (
        ("optimizer.params.lr", _argument(context, "learning_rate", 5e-5)[0]),
        ("optimizer.params.betas", betas),
        ("optimizer.params.eps", _argument(context, "adam_epsilon", 1e-8)[0]),
        ("optimizer.params.weight_decay", _argument(context, "weight_decay", 0.0)[0]),
        ("scheduler.params.warmup_max_lr", _argument(context, "learning_rate", 5e-5)[0]),
    ):
        setting = context.ds(key)
        if (
            setting
            and setting.value not in (None, "auto")
            and setting.value != value
            and value is not UNKNOWN
            and UNKNOWN not in betas
            and (number(setting.value) or key.endswith("betas"))
        ):
            fix = set_value(setting, "auto") if setting.entry.node.items is None else None
            yield Diagnostic(
                setting,
                f"{setting.name} is {setting.value} here, {value} in the training arguments: the Trainer rejects this",
                fix,
            )


@rule(
    "XL210",
    "error",
    source="transformers 5.23.0 integrations/deepspeed.py:trainer_config_finalize (ValueError)",
    fails=ds(scheduler={"type": "WarmupDecayLR", "params": {"total_num_steps": 500}})
    | args(max_steps=100, per_device_train_batch_size=2),
    passes=ds(scheduler={"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}})
    | args(max_steps=100, per_device_train_batch_size=2),
)
def schedule_length(context: LintContext) -> Iterator[Diagnostic]:
    """The DeepSpeed schedule is as long as another run: total_num_steps is not max_steps."""
    setting, steps = context.ds("scheduler.params.total_num_steps"), context.arg("max_steps")
    if (
        setting
        and steps
        and number(setting.value)
        and number(steps.value)
        and steps.value > 0
        and setting.value != steps.value
    ):
        yield Diagnostic(
            setting,
            f"total_num_steps is {setting.value} here, max_steps {steps.described}",
            set_value(setting, "auto"),
        )


@rule(
    "XL211",
    "warning",
    source="transformers 5.23.0 integrations/deepspeed.py:deepspeed_optim_sched (the JSON's section wins)",
    fails=ds(scheduler={"type": "WarmupLR", "params": {}})
    | args(lr_scheduler_type="cosine", per_device_train_batch_size=2),
    passes=ds() | args(lr_scheduler_type="cosine", per_device_train_batch_size=2),
)
def schedule_is_ignored(context: LintContext) -> Iterator[Diagnostic]:
    """lr_scheduler_type or optim has no effect: the DeepSpeed JSON has one of its own."""
    for key, section in (("lr_scheduler_type", "scheduler"), ("optim", "optimizer")):
        setting, owner = context.arg(key), context.ds(section)
        if setting and owner and context.trainer_run:
            kind = context.deepspeed.get(f"{section}.type")
            yield Diagnostic(
                setting,
                f"{key} {setting.value} has no effect: {section} {kind} in "
                f"{owner.place.file}:{owner.place.line} is used",
            )
