"""DS10x: values of the DeepSpeed JSON of a type that its reader cannot use."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from toolkit.linting import keys
from toolkit.linting.context import LintContext
from toolkit.linting.context import whole as is_whole
from toolkit.linting.edits import set_value
from toolkit.linting.examples import ds
from toolkit.linting.model import Diagnostic, Setting
from toolkit.linting.registry import rule
from toolkit.linting.rules.deepspeed_keys import STRICT

_TRUTHS = {"true", "false", "yes", "no", "on", "off", "1", "0", "t", "f", "y", "n"}


def _wrong(value: Any, types: tuple[str, ...], strict: bool) -> str | None:
    if not types or "any" in types or value == "auto" or value is None or set(types) & {"str", "dict", "list"}:
        return None
    whole, decimal = "int" in types, "float" in types
    if types == ("bool",) or types == ("NoneType", "bool"):
        fine = isinstance(value, bool) or (not strict and str(value).lower() in _TRUTHS)
        return None if fine else "true or false"
    if not (whole or decimal):
        return None
    if isinstance(value, bool):
        return "a number"
    if isinstance(value, str) and not strict:
        value = _parsed(value, whole and not decimal)
    if not isinstance(value, int | float):
        return "a whole number" if whole and not decimal else "a number"
    return "a whole number" if whole and not decimal and not strict and not is_whole(value) else None


def _parsed(text: str, whole: bool) -> Any:
    try:
        return int(text) if whole else float(text)
    except ValueError:
        return text


def _number(value: Any, types: tuple[str, ...]) -> int | float | None:
    """The number that a text plainly means."""
    if not isinstance(value, str) or not set(types) & {"int", "float"}:
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    return int(number) if number.is_integer() and "int" in types else number


@rule(
    "DS105",
    "error",
    source="deepspeed 0.19.8 runtime/config.py:_batch_assertion and pydantic's lax mode in runtime/zero/config.py",
    fails=ds(gradient_accumulation_steps="4"),
    passes=ds(gradient_accumulation_steps=4),
)
def wrong_type(context: LintContext) -> Iterator[Diagnostic]:
    """A DeepSpeed value has a type that its reader cannot use.

    At the top level nothing is converted, so "4" fails where it is first compared; in the sections pydantic
    converts what it can ("true", 5e8) and rejects the rest ("5e8", 5.5 for a whole number).
    """
    for section in ("", *STRICT):
        known = keys.section("deepspeed", section)
        for key, entry in context.deepspeed.section(section).items():
            expected = known[key].types if key in known else ()
            wrong = _wrong(entry.node.plain(), expected, strict=not section)
            if wrong:
                setting = Setting(context.deepspeed, f"{section}.{key}".lstrip("."), entry)
                better = _number(entry.node.value, expected)
                fix = set_value(setting, better) if better is not None else None
                yield Diagnostic(setting, f"{entry.node.value!r} is not {wrong}: DeepSpeed cannot use it", fix)


@rule(
    "DS108",
    "error",
    source="deepspeed 0.19.8 runtime/precision_config.py:get_bfloat16_config (`Model(**value)`)",
    fails=ds(bf16=True),
    passes=ds(bf16={"enabled": True}),
)
def section_is_not_a_mapping(context: LintContext) -> Iterator[Diagnostic]:
    """A section holds a single value.

    `"bf16": true` is not `"bf16": {"enabled": true}`: the engine raises a TypeError.
    """
    for key in ("fp16", "bf16", "zero_optimization", "optimizer", "scheduler", "flops_profiler", "aio"):
        setting = context.ds(key)
        if setting is None or setting.entry.node.entries is not None:
            continue
        if key == "zero_optimization" and isinstance(setting.value, bool):
            continue  # DS213
        value = setting.value
        fix = set_value(setting, {"enabled": value}) if key in ("fp16", "bf16") and isinstance(value, bool) else None
        yield Diagnostic(setting, f"{key} must be a section of settings, not {value!r}", fix)
