"""DS22x: parameters of the DeepSpeed JSON's optimizer and scheduler."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from toolkit.linting import keys
from toolkit.linting.context import LintContext
from toolkit.linting.edits import rename, set_value
from toolkit.linting.examples import ds
from toolkit.linting.model import Diagnostic
from toolkit.linting.near import meant, nearest
from toolkit.linting.registry import rule

_ENGINE = "deepspeed 0.19.8 runtime/engine.py:_configure_basic_optimizer, _scheduler_from_config (`cls(**params)`)"
_TEXTS = ("warmup_type", "optimizer_type", "mode")


def _adam(**params: Any) -> dict[str, str]:
    return ds(optimizer={"type": "AdamW", "params": params})


def _number(text: str) -> int | float | None:
    for convert in (int, float):
        with contextlib.suppress(ValueError):
            made = convert(text)
            return made if made - made == 0 else None
    return None


@rule(
    "DS223",
    "error",
    source=_ENGINE + " (nothing is converted)",
    fails=_adam(lr="1e-4"),
    passes=_adam(lr=1e-4),
)
def number_in_quotes(context: LintContext) -> Iterator[Diagnostic]:
    """A number in quotes among the parameters of the optimizer or scheduler.

    The parameters reach the constructor as they are, which compares or multiplies the text and raises a TypeError.
    """
    for section in ("optimizer", "scheduler"):
        for key, entry in context.deepspeed.section(f"{section}.params").items():
            value = entry.node.value
            if not isinstance(value, str) or value == "auto" or key in _TEXTS or key.startswith("//"):
                continue
            better = _number(value)
            if better is not None:
                setting = context.ds(f"{section}.params.{key}")
                yield Diagnostic(
                    setting, f"{value!r} is text: the {section} needs a number", set_value(setting, better)
                )


@rule(
    "DS224",
    "error",
    source=_ENGINE + "; the constructors of torch.optim and deepspeed.ops",
    fails=_adam(learning_rate=1e-4),
    passes=_adam(lr=1e-4),
)
def optimizer_parameter(context: LintContext) -> Iterator[Diagnostic]:
    """A parameter that this optimizer does not take: its constructor raises a TypeError."""
    facts = keys.package("deepspeed")["sections"]["optimizer.params"]
    kind = str(context.deepspeed.get("optimizer.type"))
    name = kind if kind == "SGD" else kind.lower()
    takes = [key for key, fact in facts.items() if name in fact["optimizers"]]
    for key in context.deepspeed.section("optimizer.params") if takes else ():
        if key not in takes and not key.startswith("//"):
            setting = context.ds(f"optimizer.params.{key}")
            near = "lr" if key == "learning_rate" else nearest(key, takes)
            fix = rename(setting, near) if near and setting is not None else None
            yield Diagnostic(setting, f'{kind} has no parameter "{key}"{meant(near)}', fix)


@rule(
    "DS225",
    "error",
    source="deepspeed 0.19.8 runtime/lr_schedules.py (parameters without a default)",
    fails=ds(scheduler={"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10}}),
    passes=ds(scheduler={"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 100}}),
)
def scheduler_without_length(context: LintContext) -> Iterator[Diagnostic]:
    """A scheduler without a parameter that it needs: its constructor raises a TypeError.

    WarmupDecayLR and WarmupCosineLR need total_num_steps, OneCycle its two learning rates. The Trainer fills a value
    only where it is "auto".
    """
    needs = {
        "WarmupDecayLR": ("total_num_steps",),
        "WarmupCosineLR": ("total_num_steps",),
        "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
    }
    kind = context.ds("scheduler.type")
    written = context.deepspeed.section("scheduler.params")
    for key in needs.get(str(kind.value), ()) if kind is not None else ():
        if key not in written:
            yield Diagnostic(context.ds("scheduler"), f"{kind.value if kind else ''} needs {key}")
