"""TA1xx: keys and types of the transformers training arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from toolkit.linting import keys
from toolkit.linting.context import LintContext, number
from toolkit.linting.edits import remove, rename, set_value
from toolkit.linting.examples import args
from toolkit.linting.files.kinds import known_to_scripts
from toolkit.linting.installed import installed_before
from toolkit.linting.model import Diagnostic, Setting, Severity
from toolkit.linting.near import meant, nearest
from toolkit.linting.registry import rule

_GUIDE = "transformers MIGRATION_GUIDE_V5.md, «Trainer»"
# Gone from TrainingArguments, and what takes their place: a key (renamed), or a sentence.
_GONE: dict[str, tuple[str | None, str]] = {
    "evaluation_strategy": ("eval_strategy", "renamed to eval_strategy"),
    "per_gpu_train_batch_size": ("per_device_train_batch_size", "renamed to per_device_train_batch_size"),
    "per_gpu_eval_batch_size": ("per_device_eval_batch_size", "renamed to per_device_eval_batch_size"),
    "no_cuda": ("use_cpu", "renamed to use_cpu"),
    "push_to_hub_token": ("hub_token", "renamed to hub_token"),
    "push_to_hub_model_id": ("hub_model_id", "renamed to hub_model_id"),
    "push_to_hub_organization": (None, "hub_model_id includes the organization"),
    "warmup_ratio": (None, "use warmup_steps with a ratio below 1"),
    "overwrite_output_dir": (None, "it had no effect on the Trainer; resume_from_checkpoint continues a run"),
    "logging_dir": (None, "use the TENSORBOARD_LOGGING_DIR variable"),
    "fsdp_min_num_params": (None, "use fsdp_config.min_num_params"),
    "fsdp_transformer_layer_cls_to_wrap": (None, "use fsdp_config.transformer_layer_cls_to_wrap"),
    "tpu_metrics_debug": (None, "use debug"),
    "include_inputs_for_metrics": (None, "use include_for_metrics"),
    "use_mps_device": (None, "mps is used automatically"),
    "fp16_backend": (None, "torch.amp is the only backend"),
    "half_precision_backend": (None, "torch.amp is the only backend"),
    "include_tokens_per_second": (None, "use include_num_input_tokens_seen"),
    "use_legacy_prediction_loop": (None, "there is one evaluation loop"),
    "mp_parameters": (None, "removed without a replacement"),
    "jit_mode_eval": (None, "use torch_compile"),
    "tpu_num_cores": (None, "use the TPU_NUM_CORES variable"),
    "past_index": (None, "removed without a replacement"),
    "ray_scope": (None, "use the RAY_SCOPE variable"),
    "adafactor": (None, "use optim: adafactor"),
    "dispatch_batches": (None, "use accelerator_config.dispatch_batches"),
    "split_batches": (None, "use accelerator_config.split_batches"),
    "group_by_length": (None, "use train_sampling_strategy: group_by_length"),
    "fp16_opt_level": (None, "it was for apex; torch.amp is the only backend"),
    "save_safetensors": (None, "weights are always saved as safetensors"),
    "torchdynamo": (None, "use torch_compile_backend"),
    "use_ipex": (None, "removed without a replacement"),
}


def known_arguments() -> dict[str, keys.Key]:
    """Every field of TrainingArguments and Seq2SeqTrainingArguments that we know of."""
    return keys.section("transformers", "") | keys.section("transformers", "seq2seq")


def _fits(value: Any, types: tuple[str, ...]) -> bool:
    if isinstance(value, bool):
        return "bool" in types
    if isinstance(value, int):
        return bool(set(types) & {"int", "float"}) or (value in (0, 1) and "bool" in types)
    if isinstance(value, float):
        return "float" in types or ("int" in types and value.is_integer())
    return type(value).__name__ in types


def _meant(value: Any, types: tuple[str, ...]) -> Any:
    if isinstance(value, str) and "bool" in types and value.lower() in ("true", "false"):
        return value.lower() == "true"
    try:
        number = float(value) if isinstance(value, str) else None
    except ValueError:
        return None
    if number is None or not set(types) & {"int", "float"} or number - number != 0:
        return None
    return int(number) if number.is_integer() and "int" in types else number


@rule(
    "TA101",
    "error",
    source="transformers 5.23.0 hf_argparser.py:HfArgumentParser.parse_dict (ValueError on unused keys)",
    fails=args(per_device_train_batchsize=4),
    passes=args(per_device_train_batch_size=4, model_name_or_path="my/model"),
)
def misspelt(context: LintContext) -> Iterator[Diagnostic]:
    """A training argument is misspelt.

    Only names close to a known one are reported: your script may define arguments of its own.
    """
    known = known_arguments()
    for key, entry in context.args.section("").items():
        if key in known or key in _GONE or key.startswith(("_", "//")) or key in known_to_scripts():
            continue
        near = nearest(key, known, 0.88)
        if near and near not in context.args.section(""):
            setting = Setting(context.args, key, entry)
            yield Diagnostic(setting, f'no training argument "{key}"{meant(near)}', rename(setting, near))


@rule(
    "TA102",
    "error",
    source=_GUIDE,
    fails=args(evaluation_strategy="steps"),
    passes=args(eval_strategy="steps"),
)
def gone(context: LintContext) -> Iterator[Diagnostic]:
    """A training argument that this transformers no longer has.

    TrainingArguments raises a TypeError about an unexpected keyword, the parsers a ValueError. Nothing is reported
    where the installed transformers still has it.
    """
    history = keys.gone("transformers", "")
    for key, (new, sentence) in _GONE.items():
        setting = context.arg(key)
        if setting is None or key in known_arguments() or _of_trl(context, key):
            continue
        last, without = history.get(key, ("", "5.0.0"))
        if installed_before("transformers", without):
            continue
        fix = rename(setting, new) if new else None
        if key == "warmup_ratio" and not context.args.has("warmup_steps"):
            fix = rename(setting, "warmup_steps") if number(setting.value) and 0 < setting.value < 1 else None
        elif key in ("overwrite_output_dir", "use_legacy_prediction_loop", "use_mps_device"):
            fix = remove(setting)
        seen = f"{last} has it, {without} does not" if last else "5 does not have it"
        yield Diagnostic(setting, f"{key} was removed from transformers ({seen}): {sentence}", fix)


def _of_trl(context: LintContext, key: str) -> bool:
    """An argument that TRL's own configs define."""
    return context.args.tool == "trl" and any(
        key in keys.section("trl", section) for section in keys.package("trl")["sections"]
    )


@rule(
    "TA103",
    "note",
    source="transformers 5.23.0 training_args.py:__post_init__ (FutureWarning; «removed in v6»)",
    fails=args(gradient_checkpointing=True),
    passes=args(activation_checkpointing=True),
)
def deprecated(context: LintContext) -> Iterator[Diagnostic]:
    """gradient_checkpointing has a new name, activation_checkpointing.

    Both work in transformers 5.23; versions up to 5.17 know the old name only, so nothing is changed for you.
    """
    for key in ("gradient_checkpointing", "gradient_checkpointing_kwargs"):
        setting, new = context.arg(key), key.replace("gradient", "activation")
        if setting is not None and context.arg(new) is None and context.args.syntax != "shell":
            since = known_arguments()[new].since
            yield Diagnostic(
                setting,
                f"{key} is deprecated: use {new} (available since {since} at the latest, not in 5.17)",
            )


@rule(
    "TA104",
    "error",
    source="transformers 5.23.0 training_args.py (a dataclass: values are used as they come)",
    fails=args(learning_rate="2e-4"),
    passes=args(learning_rate=2e-4),
)
def wrong_type(context: LintContext) -> Iterator[Diagnostic]:
    """A training argument has the wrong type.

    JSON and YAML values are not converted: a learning rate in quotes fails in the optimizer, and the text
    "false" counts as true. TrlParser does convert what a YAML file has: there, a number in quotes is a warning,
    and none in a file of TRL.
    """
    if context.args.syntax == "shell" or context.args.tool not in ("trainer", "trl"):
        return
    for key, fact in known_arguments().items():
        setting = context.arg(key)
        if setting is None or not fact.types or set(fact.types) & {"str", "any", "dict", "list"}:
            continue
        value = setting.value
        if value is None or _fits(value, fact.types):
            continue
        better = _meant(value, fact.types)
        if better is not None and context.args.tool == "trl":
            continue
        if better is not None and _unquoted(setting):
            continue  # KY103
        severity: Severity | None = "warning" if better is not None and context.args.syntax == "yaml" else None
        fix = set_value(setting, better) if better is not None else None
        expected = " or ".join(t for t in fact.types if t != "NoneType")
        yield Diagnostic(setting, f"{value!r} is {type(value).__name__}, not {expected}", fix, severity)


def _unquoted(setting: Setting) -> bool:
    node, value = setting.entry.node, setting.value
    return (
        setting.source.syntax == "yaml" and setting.source.text[node.start : node.end] == value and "e" in value.lower()
    )


@rule(
    "TA110",
    "error",
    source="transformers 5.23.0 training_args.py:__post_init__ (enums: ValueError)",
    fails=args(optim="adamw_tor"),
    passes=args(optim="adamw_torch"),
)
def no_such_choice(context: LintContext) -> Iterator[Diagnostic]:
    """A training argument that is not one of its choices."""
    for key, fact in known_arguments().items():
        setting = context.arg(key)
        if setting is None or not fact.choices or not isinstance(setting.value, str) or setting.value in fact.choices:
            continue
        near = nearest(setting.value, fact.choices, 0.6)
        fix = set_value(setting, near) if near and nearest(setting.value, fact.choices, 0.85) else None
        yield Diagnostic(setting, f"{setting.value!r} is not a valid {key}{meant(near)}", fix)


@rule(
    "TA111",
    "error",
    source="transformers 5.23.0 trainer_pt_utils.py:AcceleratorConfig (a dataclass: TypeError)",
    fails=args(accelerator_config={"split_batch": True}),
    passes=args(accelerator_config={"split_batches": False}),
)
def accelerator_config_key(context: LintContext) -> Iterator[Diagnostic]:
    """An unknown key in accelerator_config."""
    known = keys.section("transformers", "accelerator_config")
    for key, entry in context.args.section("accelerator_config").items():
        if key not in known:
            setting = Setting(context.args, f"accelerator_config.{key}", entry)
            near = nearest(key, known)
            yield Diagnostic(setting, f'unknown key "{key}"{meant(near)}', rename(setting, near) if near else None)


@rule(
    "TA116",
    "note",
    source="the TrainingArguments of transformers 5.17.0 and 5.23.0, compared (toolkit/linting/keys)",
    fails=args(activation_checkpointing=True),
    passes=args(per_device_train_batch_size=2),
)
def newer_than_some(context: LintContext) -> Iterator[Diagnostic]:
    """A training argument that only newer versions of transformers have.

    A note on machines that have it; an error if the installed transformers is older than the argument.
    """
    oldest = keys.versions("transformers")[0]
    for key, fact in known_arguments().items():
        setting = context.arg(key)
        if setting is None or fact.since is None or context.args.syntax == "shell":
            continue
        missing = installed_before("transformers", fact.since)
        there = f"the installed {missing} does not have it" if missing else f"{oldest} does not have it"
        message = f"{key} needs transformers {fact.since}; {there} and raises a TypeError"
        yield Diagnostic(setting, message, severity="error" if missing else None)
