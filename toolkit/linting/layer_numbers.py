"""Topics of the numbers: accumulation, clipping, precision, stage, micro-batch."""

from __future__ import annotations

from toolkit.linting import keys
from toolkit.linting.context import LintContext, true
from toolkit.linting.layer_answers import Answer, Answers, alone, by_default, not_read, number_of, stops, topic, written
from toolkit.linting.model import Setting


@topic("gradient_accumulation_steps")
def _accumulation(context: LintContext) -> Answers:
    json, yaml, arg = (
        context.ds("gradient_accumulation_steps"),
        number_of(context, "gradient_accumulation_steps"),
        context.arg("gradient_accumulation_steps"),
    )
    mine = json if json is not None and json.value != "auto" else None
    if context.uses != "deepspeed":
        bare = by_default(1, "accelerate", "without DeepSpeed only the script's own argument sets it")
    elif "deepspeed" in context.kinds:
        if json is None:
            bare = by_default(1, "accelerate's DeepSpeed plugin", "it is not in the JSON")
        elif mine is None:
            bare = by_default(1, "accelerate", '"auto" becomes the Accelerator\'s own number')
        else:
            bare = written(mine, "DeepSpeed's number wins over the Accelerator's, with a warning")
    else:
        bare = written(yaml, "the launcher passes it to the plugin") if yaml else by_default(1, "accelerate")
    only = alone(context, "gradient_accumulation_steps", 1)
    fixed = mine or (yaml if "deepspeed" not in context.kinds else None)
    steps = arg.value if arg else 1
    if json is None and "deepspeed" in context.kinds and steps != 1 and not context.arg_true("deepspeed"):
        trainer = stops("ValueError", arg, "the plugin puts 1 into the JSON, which differs from the argument")
    elif fixed is not None and context.uses == "deepspeed" and fixed.value != steps:
        trainer = stops(
            "ValueError",
            fixed,
            f"{fixed.value} here and {steps} in the training arguments: the Trainer rejects this",
        )
    else:
        trainer = written(arg, "the Trainer accumulates itself") if arg else by_default(1, "TrainingArguments")
    return bare, only, trainer


@topic("gradient_clipping", "max_grad_norm")
def _clipping(context: LintContext) -> Answers:
    json, yaml, arg = (
        context.ds("gradient_clipping"),
        number_of(context, "gradient_clipping"),
        context.arg("max_grad_norm"),
    )
    mine = json if json is not None and json.value != "auto" else None
    default = keys.section("deepspeed", "")["gradient_clipping"].default
    if context.uses != "deepspeed":
        bare = not_read("without DeepSpeed only the script's own clip_grad_norm_ clips")
    elif "deepspeed" in context.kinds:
        if json is None:
            bare = by_default(default, "DeepSpeed", "it is not in the JSON; the script's clip_grad_norm_ does nothing")
        elif mine is None:
            bare = by_default(1.0, "accelerate", '"auto" becomes 1.0 in prepare')
        else:
            bare = written(mine, "DeepSpeed clips; the script's clip_grad_norm_ does nothing")
    else:
        bare = (
            written(yaml, "the launcher passes it to the plugin")
            if yaml
            else by_default(1.0, "accelerate", '"auto" becomes 1.0 in prepare')
        )
    only = alone(context, "gradient_clipping", default)
    norm = arg.value if arg else 1.0
    fixed = mine or (yaml if "deepspeed" not in context.kinds else None)
    if context.uses == "deepspeed" and fixed is not None:
        if fixed.value != norm:
            trainer = stops(
                "ValueError",
                fixed,
                f"{fixed.value} here and max_grad_norm {norm}: the Trainer rejects this",
            )
        else:
            trainer = written(fixed, "DeepSpeed clips, at the same value as max_grad_norm")
    elif context.uses == "deepspeed" and "deepspeed" in context.kinds and json is None:
        trainer = by_default(
            default,
            "DeepSpeed",
            'it is not in the JSON, and max_grad_norm is filled in only for an "auto"',
        )
    else:
        trainer = (
            written(arg, 'the Trainer clips, or fills DeepSpeed\'s "auto"')
            if arg
            else by_default(1.0, "TrainingArguments")
        )
    return bare, only, trainer


@topic("mixed_precision", "bf16", "fp16", "bf16.enabled", "fp16.enabled")
def _precision(context: LintContext) -> Answers:
    launch = context.precision
    asked = "no" if launch is None or launch.value in (None, False) else str(launch.value)
    bare = _plugin_precision(context, asked, launch)
    if "deepspeed" not in context.kinds:
        only = not_read("there is no DeepSpeed JSON")
    else:
        only = _stored(context) or by_default("no", "DeepSpeed", 'an "auto" or missing section is off')
    return bare, only, _trainer_precision(context, asked, launch)


def _stored(context: LintContext) -> Answer | None:
    for name in ("bf16", "fp16"):
        setting = context.ds(f"{name}.enabled")
        if setting is not None and true(setting.value):
            return written(setting, "the DeepSpeed config alone decides", name)
    return None


def _plugin_precision(context: LintContext, asked: str, launch: Setting | None) -> Answer:
    given = written(launch, "the launcher passes it on", asked) if launch else by_default("no", "accelerate")
    if context.uses != "deepspeed" or "deepspeed" not in context.kinds:
        return given
    other = {"bf16": "fp16", "fp16": "bf16"}.get(asked)
    clash = context.ds(f"{other}.enabled") if other else None
    if clash is not None and true(clash.value):
        return stops("ValueError", clash, f"{other} is enabled here, the launch asks for {asked}")
    own = context.ds(f"{asked}.enabled") if other else None
    if own is not None and own.value is False:
        return written(own, f"the JSON's false wins over {asked}", "no")
    return _stored(context) or given


def _trainer_precision(context: LintContext, asked: str, launch: Setting | None) -> Answer:
    arg = next((context.arg(name) for name in ("fp16", "bf16") if context.args.get(name) is True), None)
    if context.uses == "deepspeed":
        for name in ("fp16", "bf16"):
            stored = context.ds(f"{name}.enabled")
            mine = bool(arg and arg.name == name)
            if stored is not None and isinstance(stored.value, bool) and stored.value != mine:
                return stops(
                    "ValueError",
                    stored,
                    f"{name} is {str(stored.value).lower()} here, {str(mine).lower()} in the arguments",
                )
        if arg is None and asked in ("bf16", "fp16") and not context.arg_true("deepspeed"):
            return stops(
                "ValueError",
                launch,
                f"accelerate enables {asked} in the DeepSpeed config, the arguments do not",
            )
    if arg is not None:
        return written(arg, "a true argument wins over the accelerate config", arg.name)
    if launch is not None:
        return written(launch, "no argument is true: the launcher's precision is used", asked)
    return by_default("no", "TrainingArguments")


@topic("zero_stage", "zero_optimization.stage", "stage")
def _stage(context: LintContext) -> Answers:
    json, yaml = context.ds("zero_optimization.stage"), context.acc("deepspeed_config.zero_stage")
    stored = written(json, "the JSON is the DeepSpeed config") if json else by_default(0, "DeepSpeed")
    only = stored if "deepspeed" in context.kinds else not_read("there is no DeepSpeed JSON")
    if context.uses != "deepspeed":
        nothing = not_read("DeepSpeed is not used")
        return nothing, only, nothing
    if "deepspeed" in context.kinds:
        if json is None and context.ds("zero_optimization") is None:
            bare = stops("ValueError", None, "accelerate rejects a DeepSpeed JSON without zero_optimization")
        else:
            bare = stored
    else:
        bare = (
            written(yaml, "the launcher passes it to the plugin")
            if yaml
            else by_default(2, "accelerate's DeepSpeed plugin")
        )
    return bare, only, bare


@topic("train_micro_batch_size_per_gpu", "per_device_train_batch_size")
def _micro(context: LintContext) -> Answers:
    json, arg = context.ds("train_micro_batch_size_per_gpu"), context.arg("per_device_train_batch_size")
    mine = json if json is not None and json.value != "auto" else None
    bare = (
        written(mine, "DeepSpeed uses its own number")
        if mine
        else Answer("the data loader's batch size", "the script", "nothing else sets it")
    )
    if "deepspeed" in context.kinds and json is None and context.ds("train_batch_size") is None:
        bare = stops("AssertionError", None, 'DeepSpeed needs a batch size; only an "auto" is filled in')
    only = alone(context, "train_micro_batch_size_per_gpu", None)
    size = arg.value if arg else 8
    if mine is not None and context.uses == "deepspeed" and mine.value != size:
        return bare, only, stops("ValueError", mine, f"{mine.value} here, {size} in the training arguments")
    return (
        bare,
        only,
        written(arg, "the Trainer's loader uses it") if arg else by_default(8, "TrainingArguments"),
    )
