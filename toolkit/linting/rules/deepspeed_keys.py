"""DS1xx: keys of the DeepSpeed JSON that are unknown, removed or renamed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from toolkit.linting import keys
from toolkit.linting.context import LintContext
from toolkit.linting.edits import remove, rename
from toolkit.linting.examples import ds
from toolkit.linting.model import Diagnostic, Setting
from toolkit.linting.near import meant, nearest
from toolkit.linting.registry import rule

# Sections that are pydantic models with extra="forbid": an unknown key there is rejected.
STRICT = (
    "zero_optimization",
    "zero_optimization.offload_param",
    "zero_optimization.offload_optimizer",
    "fp16",
    "bf16",
    "tensorboard",
    "wandb",
    "csv_monitor",
    "comet",
    "hybrid_engine",
    "tensor_parallel",
    "tensor_parallel.tp",
    "compile",
    "zero_optimization.zenflow",
    "zero_optimization.leaf_module",
)
# Sections that hand-written code reads key by key: an unknown key there is never looked at.
_LOOSE = (
    "activation_checkpointing",
    "flops_profiler",
    "data_types",
    "checkpoint",
    "aio",
    "optimizer",
    "scheduler",
)
_DEPRECATED = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "cpu_offload_use_pin_memory": "offload_optimizer.pin_memory or offload_param.pin_memory",
    "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
}


def _comment(key: str) -> bool:
    return key.startswith(("_", "//", "#", "$"))


@rule(
    "DS101",
    "error",
    source="deepspeed 0.19.8 runtime/config.py:DeepSpeedConfig._initialize_params (reads by name, rejects nothing)",
    fails=ds(gradient_cliping=0.5),
    passes=ds(),
)
def unknown_top_level(context: LintContext) -> Iterator[Diagnostic]:
    """DeepSpeed does not know a top-level key.

    It reads the top level by name and ignores the rest: a misspelt gradient_clipping clips at the default,
    1.0.
    """
    known = keys.section("deepspeed", "")
    for key, entry in context.deepspeed.section("").items():
        if key in known or _comment(key) or key in keys.section("deepspeed", "removed"):
            continue
        setting = Setting(context.deepspeed, key, entry)
        near = nearest(key, known)
        default = known[near].default if near else None
        then = f": your run would use {near}'s default, {default}" if default is not None else ""
        yield Diagnostic(
            setting,
            f'unknown key "{key}"{meant(near)}; DeepSpeed ignores unknown top-level keys{then}',
            rename(setting, near) if near else None,
            "error" if near else "warning",
        )


@rule(
    "DS102",
    "error",
    source='deepspeed 0.19.8 runtime/config_utils.py:DeepSpeedConfigModel (extra="forbid")',
    fails=ds(zero={"overlap_com": True}),
    passes=ds(zero={"overlap_comm": True, "reduce_bucket_size": 50000000}),
)
def unknown_nested(context: LintContext) -> Iterator[Diagnostic]:
    """A section of the DeepSpeed config has a key that its model rejects.

    These sections are pydantic models that forbid extra keys: the engine raises a ValidationError.
    """
    for section in STRICT:
        known = keys.section("deepspeed", section)
        for key, entry in context.deepspeed.section(section).items():
            if key in known or key in keys.section("deepspeed", "removed.zero_optimization"):
                continue
            setting = Setting(context.deepspeed, f"{section}.{key}", entry)
            if key.startswith("//"):
                yield Diagnostic(setting, f"{section} does not accept comments: DeepSpeed rejects every unknown key")
                continue
            near = nearest(key, known)
            message = f'unknown key "{key}" in {section}{meant(near)}; DeepSpeed rejects it'
            yield Diagnostic(setting, message, rename(setting, near) if near else None)


@rule(
    "DS103",
    "warning",
    source="deepspeed 0.19.8 runtime/activation_checkpointing/config.py, profiling/config.py and their like",
    fails=ds(activation_checkpointing={"partition_activation": True}),
    passes=ds(flops_profiler={"enabled": False}),
)
def unknown_ignored(context: LintContext) -> Iterator[Diagnostic]:
    """A section of the DeepSpeed config has a key that nothing reads.

    These sections are read key by key, so a misspelt one leaves its default in force.
    """
    for section in _LOOSE:
        known = keys.section("deepspeed", section)
        for key, entry in context.deepspeed.section(section).items():
            if key not in known and not _comment(key):
                setting = Setting(context.deepspeed, f"{section}.{key}", entry)
                near = nearest(key, known)
                message = f'unknown key "{key}" in {section}{meant(near)}; nothing reads it'
                yield Diagnostic(setting, message, rename(setting, near) if near else None)


@rule(
    "DS104",
    "error",
    source="deepspeed 0.19.8 runtime/config.py:_REMOVED_TOP_LEVEL_CONFIG_KEYS (issue 8489)",
    fails=ds(elasticity={"enabled": True}),
    passes=ds(),
)
def removed_feature(context: LintContext) -> Iterator[Diagnostic]:
    """A feature that this DeepSpeed has removed.

    The engine raises DeepSpeedConfigError; older versions took the key.
    """
    for prefix, section in (("", "removed"), ("zero_optimization", "removed.zero_optimization")):
        reasons: dict[str, Any] = keys.package("deepspeed")["sections"][section]
        for key, entry in context.deepspeed.section(prefix).items():
            if key in reasons:
                why = reasons[key]["why"].partition(" See http")[0].strip()
                setting = Setting(context.deepspeed, f"{prefix}.{key}".lstrip("."), entry)
                yield Diagnostic(setting, f"rejected by DeepSpeed {keys.versions('deepspeed')[-1]}: {why}")


@rule(
    "DS106",
    "warning",
    source="deepspeed 0.19.8 runtime/zero/config.py:DeepSpeedZeroConfig (deprecated fields)",
    fails=ds(3, zero={"stage3_gather_fp16_weights_on_model_save": True}),
    passes=ds(3, zero={"stage3_gather_16bit_weights_on_model_save": True}),
)
def deprecated_key(context: LintContext) -> Iterator[Diagnostic]:
    """A ZeRO key under its old name.

    DeepSpeed still maps it to the new one, with a warning on every rank.
    """
    for key, new in _DEPRECATED.items():
        setting = context.ds(f"zero_optimization.{key}")
        if setting is None or context.ds(f"zero_optimization.{new}") is not None:
            continue
        fix = None
        if key.startswith("stage3"):
            fix = rename(setting, new)
        elif setting.value is False:
            fix = remove(setting)
        yield Diagnostic(setting, f"{key} is deprecated: use {new}", fix)


@rule(
    "DS107",
    "error",
    source="deepspeed 0.19.8 runtime/config_utils.py:_process_deprecated_field (assert)",
    fails=ds(zero={"cpu_offload": True, "offload_optimizer": {"device": "cpu"}}),
    passes=ds(zero={"offload_optimizer": {"device": "cpu", "pin_memory": True}}),
)
def old_and_new_name(context: LintContext) -> Iterator[Diagnostic]:
    """A deprecated ZeRO key is set together with its replacement.

    DeepSpeed asserts that only one of them is there.
    """
    for key, new in _DEPRECATED.items():
        setting = context.ds(f"zero_optimization.{key}")
        if setting is not None and key != "cpu_offload_use_pin_memory" and context.ds(f"zero_optimization.{new}"):
            yield Diagnostic(
                setting,
                f"{key} and its replacement {new} are both set: DeepSpeed rejects this",
                remove(setting),
            )
