"""DS22x: numbers of the DeepSpeed JSON that its models reject, or that turn a feature off."""

from __future__ import annotations

import operator
from collections.abc import Iterator

from toolkit.linting import keys
from toolkit.linting.context import LintContext, number
from toolkit.linting.examples import ds
from toolkit.linting.model import Diagnostic, Setting
from toolkit.linting.registry import rule
from toolkit.linting.rules.deepspeed_keys import STRICT

_HOLDS = {"gt": operator.gt, "ge": operator.ge, "lt": operator.lt, "le": operator.le}
_WORDS = {"gt": "above {}", "ge": "{} or more", "lt": "below {}", "le": "{} or less"}
_SAVES = {"stage3_gather_16bit_weights_on_model_save": True}
# Keys of zero_optimization that turn something off at 0, under either of their names.
_OFF_AT_ZERO = {
    "max_live_parameters": "no parameter is ever prefetched: each layer waits for its own all-gather",
    "sub_group_size": "each parameter is a group of its own, so the optimizer step runs once per parameter",
}


@rule(
    "DS221",
    "error",
    source="deepspeed 0.19.8 runtime/zero/config.py, offload_config.py and their like (pydantic Field(ge=, gt=, le=))",
    fails=ds(zero={"reduce_bucket_size": 0}),
    passes=ds(zero={"reduce_bucket_size": 50000000}),
)
def out_of_bounds(context: LintContext) -> Iterator[Diagnostic]:
    """A number outside the limits of DeepSpeed's own model: the engine raises a ValidationError."""
    for section in STRICT:
        known = keys.section("deepspeed", section)
        for key, entry in context.deepspeed.section(section).items():
            value = entry.node.plain()
            bounds = known[key].bounds if key in known else ()
            if not number(value) or all(_HOLDS[name](value, limit) for name, limit in bounds):
                continue
            wanted = " and ".join(_WORDS[name].format(f"{limit:g}") for name, limit in bounds)
            setting = Setting(context.deepspeed, f"{section}.{key}", entry)
            yield Diagnostic(setting, f"{key} must be {wanted}: DeepSpeed rejects {value:g}")


@rule(
    "DS222",
    "warning",
    source="deepspeed 0.19.8 runtime/zero/partitioned_param_coordinator.py:_fetch_sub_module_impl "
    "(max_params_to_prefetch), stage3.py:_create_fp16_sub_groups",
    fails=ds(3, zero={"stage3_max_live_parameters": 0, **_SAVES}),
    passes=ds(3, zero={"stage3_max_live_parameters": 1000000000, **_SAVES}),
)
def feature_turned_off(context: LintContext) -> Iterator[Diagnostic]:
    """A ZeRO-3 setting of 0 that silently turns a feature off.

    0 is not «no limit»: with stage3_max_live_parameters 0 nothing is prefetched, and with sub_group_size 0 every
    parameter is a group of its own.
    """
    if context.deepspeed.get("zero_optimization.stage", 0) != 3:
        return
    for name, effect in _OFF_AT_ZERO.items():
        for key in (name, f"stage3_{name}"):
            setting = context.ds(f"zero_optimization.{key}")
            if setting is not None and number(setting.value) and setting.value == 0:
                yield Diagnostic(setting, f"{key} 0: {effect}; its default is 1e9")
