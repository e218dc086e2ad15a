"""DS21x: the optimizer and scheduler of the DeepSpeed JSON."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.linting import keys
from toolkit.linting.context import LintContext, true
from toolkit.linting.edits import add
from toolkit.linting.examples import ds
from toolkit.linting.model import Diagnostic
from toolkit.linting.near import meant, nearest
from toolkit.linting.registry import rule

_OPTIMIZERS = ("adagrad", "adam", "adamw", "lamb", "muadam", "muadamw", "musgd", "lion", "muon")
_TORCH_OPTIMIZERS = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon", "NAdam", "RAdam",
    "RMSprop", "Rprop", "SGD", "SparseAdam",
)  # fmt: skip
_SCHEDULERS = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")


@rule(
    "DS214",
    "error",
    source="deepspeed 0.19.8 runtime/engine.py:2300 (assert) and zero/utils.py:is_zero_supported_optimizer",
    reader="deepspeed",
    fails=ds(optimizer={"type": "SGD", "params": {"lr": 0.1}}),
    passes=ds(optimizer={"type": "SGD", "params": {"lr": 0.1}}, zero_allow_untested_optimizer=True),
)
def untested_optimizer(context: LintContext) -> Iterator[Diagnostic]:
    """An optimizer that ZeRO was not tested with.

    The engine asserts zero_allow_untested_optimizer for every optimizer but its own and Adam variants.
    """
    setting = context.ds("optimizer.type")
    if setting is None or context.deepspeed.get("zero_optimization.stage", 0) in (0, "0"):
        return
    untested = str(setting.value) in _TORCH_OPTIMIZERS and str(setting.value).lower() not in _OPTIMIZERS
    if untested and not true(context.deepspeed.get("zero_allow_untested_optimizer")):
        fix = add(context.deepspeed, "", "zero_allow_untested_optimizer", True)
        yield Diagnostic(
            setting,
            f"{setting.value} is untested with ZeRO: DeepSpeed requires zero_allow_untested_optimizer",
            fix,
        )


@rule(
    "DS215",
    "error",
    source="deepspeed 0.19.8 runtime/engine.py:_configure_basic_optimizer, is_supported_optimizer",
    fails=ds(optimizer={"type": "OneBitAdam", "params": {"lr": 1e-4}}),
    passes=ds(optimizer={"type": "AdamW", "params": {"lr": 1e-4}}),
)
def unknown_optimizer(context: LintContext) -> Iterator[Diagnostic]:
    """An optimizer that neither DeepSpeed nor torch has."""
    setting = context.ds("optimizer.type")
    known = [*_OPTIMIZERS, *_TORCH_OPTIMIZERS]
    if (
        setting
        and isinstance(setting.value, str)
        and setting.value.lower() not in _OPTIMIZERS
        and setting.value not in known
    ):
        yield Diagnostic(
            setting,
            f"no optimizer {setting.value!r} in DeepSpeed 0.19.8 or torch{meant(nearest(setting.value, known))}",
        )


@rule(
    "DS216",
    "error",
    source="deepspeed 0.19.8 runtime/lr_schedules.py and runtime/engine.py:_scheduler_from_config",
    fails=ds(scheduler={"type": "WarmupLR", "params": {"total_num_steps": 100}}),
    passes=ds(scheduler={"type": "WarmupDecayLR", "params": {"total_num_steps": 100}}),
)
def scheduler_parameter(context: LintContext) -> Iterator[Diagnostic]:
    """A parameter that this DeepSpeed scheduler does not take.

    The parameters go to the scheduler's constructor as they are: it raises a TypeError.
    """
    kind = context.deepspeed.get("scheduler.type")
    if kind not in _SCHEDULERS:
        return
    facts = keys.package("deepspeed")["sections"]["scheduler.params"]
    takes = [key for key, fact in facts.items() if kind in fact["schedulers"]]
    for key in context.deepspeed.section("scheduler.params"):
        if key not in takes and not key.startswith("//"):
            setting = context.ds(f"scheduler.params.{key}")
            yield Diagnostic(setting, f'{kind} has no parameter "{key}"{meant(nearest(key, takes))}')
