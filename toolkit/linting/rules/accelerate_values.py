"""AC1xx: values of the accelerate config that the launcher cannot process, and missing ones."""

from __future__ import annotations

import re
from collections.abc import Iterator

from toolkit.linting import keys
from toolkit.linting.context import LintContext
from toolkit.linting.edits import add, remove, set_value
from toolkit.linting.examples import acc, fsdp2, multi_gpu, zero
from toolkit.linting.model import Diagnostic
from toolkit.linting.near import meant, nearest
from toolkit.linting.registry import rule

_LAUNCH = "accelerate 1.15.0 commands/launch.py:_validate_launch_command"


@rule(
    "AC103",
    "error",
    source="accelerate 1.15.0 utils/launch.py:prepare_multi_gpu_env, utils/dataclasses.py (enums)",
    fails=acc("distributed_type: MULTI_GPU", "mixed_precision: bfloat16", "num_processes: 2"),
    passes=multi_gpu(),
)
def no_such_choice(context: LintContext) -> Iterator[Diagnostic]:
    """A value that is not one of the choices."""
    for path, upper in (
        ("distributed_type", False),
        ("mixed_precision", False),
        ("fsdp_config.fsdp_auto_wrap_policy", True),
        ("fsdp_config.fsdp_sharding_strategy", True),
        ("fsdp_config.fsdp_version", False),
        ("parallelism_config.parallelism_config_sp_backend", False),
        ("fp8_config.fp8_backend", False),
    ):
        section, _, name = path.rpartition(".")
        choices = keys.section("accelerate", section)[name].choices
        setting = context.acc(path)
        if setting is None or setting.value is None or isinstance(setting.value, bool | dict | list):
            continue
        value = str(setting.value).upper() if upper else str(setting.value)
        value = value.lower() if name in ("mixed_precision", "fp8_backend") else value
        if name == "fsdp_sharding_strategy" and value in "12345":
            continue
        if value not in choices and not (name == "distributed_type" and value == "MULTI_CPU"):
            near = nearest(value, choices, 0.6)
            fix = set_value(setting, near) if near else None
            listed = ", ".join(choices) if len(choices) < 7 else f"one of accelerate's {len(choices)}"
            yield Diagnostic(setting, f"{setting.value!r} is not {listed}{meant(near)}", fix)


@rule(
    "AC108",
    "error",
    source="accelerate 1.15.0 utils/launch.py (`args.mixed_precision.lower()`: bool has no lower); YAML 1.1",
    fails=acc("distributed_type: MULTI_GPU", "mixed_precision: no", "num_processes: 2"),
    passes=acc("distributed_type: MULTI_GPU", "mixed_precision: 'no'", "num_processes: 2"),
)
def precision_no(context: LintContext) -> Iterator[Diagnostic]:
    """A bare `no` for mixed_precision is the boolean false.

    accelerate then fails with «'bool' object has no attribute 'lower'». Quotes make it the text that is
    meant.
    """
    setting = LintContext._in(context.accelerate, "mixed_precision")
    if setting is not None and isinstance(setting.value, bool):
        fix = set_value(setting, "no") if setting.value is False else None
        yield Diagnostic(
            setting,
            f"YAML reads this as {str(setting.value).lower()}, which accelerate does not accept; quote it: 'no'",
            fix,
        )


@rule(
    "AC109",
    "error",
    source="accelerate 1.15.0 commands/config/config_args.py:process_config (ValueError)",
    fails=acc("mixed_precision: bf16", "num_processes: 2"),
    passes=multi_gpu(),
)
def no_distributed_type(context: LintContext) -> Iterator[Diagnostic]:
    """distributed_type is not set: accelerate rejects the file."""
    if "accelerate" in context.kinds and not context.accelerate.has("distributed_type"):
        yield context.at_file(
            context.accelerate,
            "distributed_type is not set: accelerate rejects the file",
            "distributed_type",
        )


@rule(
    "AC110",
    "warning",
    source=f"{_LAUNCH} (ValueError: «You need to manually pass in `--num_processes`»)",
    fails=acc("distributed_type: FSDP", "mixed_precision: bf16", "fsdp_config:", "  fsdp_version: 2"),
    passes=fsdp2(),
)
def no_processes(context: LintContext) -> Iterator[Diagnostic]:
    """num_processes is not set: accelerate launch requires it on the command line."""
    written = context.sets_acc("num_processes")
    if "accelerate" in context.kinds and context.local and not written and context.distributed_type not in (None, "NO"):
        yield context.at_file(
            context.accelerate,
                "num_processes is not set: accelerate launch fails "
                "unless the flag is given",
            "num_processes", severity="error" if context.launch.launcher == "accelerate" else None,
        )  # fmt: skip


@rule(
    "AC111",
    "error",
    source=f"{_LAUNCH} (`args.gpu_ids.split`: int has no split)",
    fails=multi_gpu("gpu_ids: 0"),
    passes=multi_gpu("gpu_ids: '0,1'"),
)
def bare_gpu_id(context: LintContext) -> Iterator[Diagnostic]:
    """gpu_ids is a number or a list, not text.

    accelerate splits it at commas: a bare 0 ends in an AttributeError.
    """
    setting = LintContext._in(context.accelerate, "gpu_ids")
    if setting is None or isinstance(setting.value, str) or setting.value is None:
        return
    value = setting.value
    text = ",".join(str(item) for item in value) if isinstance(value, list) else str(value)
    fix = set_value(setting, text) if not isinstance(value, bool | dict) else None
    yield Diagnostic(setting, f"gpu_ids must be a string, such as '{text}': accelerate splits it at commas", fix)


@rule(
    "AC114",
    "error",
    source="accelerate 1.15.0 utils/launch.py (`str(None).lower()` becomes the variable's "
    "value), dataclasses.py:str_to_bool",
    fails=fsdp2("fsdp_offload_params: null"),
    passes=fsdp2("fsdp_offload_params: false"),
)
def null_switch(context: LintContext) -> Iterator[Diagnostic]:
    """An FSDP switch without a value.

    The launcher passes on the text "none", and the plugin fails on it. Leave the line out, or write true or
    false.
    """
    for key, fact in keys.section("accelerate", "fsdp_config").items():
        setting = context.acc(f"fsdp_config.{key}")
        if setting is not None and setting.value is None and fact.types == ("bool", "str"):
            yield Diagnostic(setting, f"{key} has no value: the plugin gets the text 'none' and fails", remove(setting))


@rule(
    "AC115",
    "error",
    source="accelerate 1.15.0 utils/dataclasses.py:str_to_bool (ValueError: invalid truth value)",
    fails=fsdp2("fsdp_offload_params: ture"),
    passes=fsdp2("fsdp_offload_params: 'true'"),
)
def not_a_truth(context: LintContext) -> Iterator[Diagnostic]:
    """An FSDP switch that is neither true nor false."""
    truths = {"true", "false", "yes", "no", "1", "0", "y", "n", "t", "f", "on", "off"}
    for key, fact in keys.section("accelerate", "fsdp_config").items():
        setting = context.acc(f"fsdp_config.{key}")
        if setting is None or setting.value is None or fact.types != ("bool", "str"):
            continue
        if key != "fsdp_reshard_after_forward" and str(setting.value).lower() not in truths:
            near = nearest(str(setting.value), ("true", "false"), 0.6)
            fix = set_value(setting, near == "true") if near else None
            yield Diagnostic(setting, f"{setting.value!r} is neither true nor false{meant(near)}", fix)


@rule(
    "AC116",
    "error",
    source="accelerate 1.15.0 utils/dataclasses.py:DeepSpeedPlugin.__post_init__ (int() and float() of the variables)",
    fails=zero("zero_stage: two"),
    passes=zero("zero_stage: 2"),
)
def not_a_number(context: LintContext) -> Iterator[Diagnostic]:
    """A value of deepspeed_config that must be a number, but is not.

    They reach the plugin as text: zero_stage must be a digit (2.0 is none), gradient_clipping a number (1e-1 is one),
    gradient_accumulation_steps a whole number.
    """
    for key, fits, expected in (
        ("zero_stage", re.compile("[0-3]"), "0, 1, 2 or 3"),
        ("gradient_clipping", re.compile(r"auto|[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE), "a number"),
        ("gradient_accumulation_steps", re.compile(r"auto|\d+"), "a whole number"),
    ):
        setting = context.acc(f"deepspeed_config.{key}")
        if setting is not None and setting.value is not None and not fits.fullmatch(str(setting.value)):
            yield Diagnostic(setting, f"{setting.value!r} is not {expected}")


@rule(
    "AC117",
    "note",
    source="accelerate 1.15.0 utils/dataclasses.py:DeepSpeedPlugin.__post_init__ (zero_stage defaults to 2)",
    fails=zero("gradient_accumulation_steps: 1"),
    passes=zero("zero_stage: 2"),
)
def stage_nobody_set(context: LintContext) -> Iterator[Diagnostic]:
    """zero_stage is not set: accelerate uses ZeRO-2."""
    if context.distributed_type != "DEEPSPEED" or "accelerate" not in context.kinds:
        return
    if not any(context.sets_acc(f"deepspeed_config.{key}") for key in ("zero_stage", "deepspeed_config_file")):
        fix = add(context.accelerate, "deepspeed_config", "zero_stage", 2)
        message = "zero_stage is not set: accelerate uses ZeRO-2"
        yield context.at_file(context.accelerate, message, "deepspeed_config.zero_stage", fix=fix)
