"""LR81x: values of a PEFT adapter config, by its method."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.linting import keys
from toolkit.linting.context import LintContext, number, whole
from toolkit.linting.edits import set_value
from toolkit.linting.examples import ADAPTER, lora
from toolkit.linting.model import Diagnostic
from toolkit.linting.near import meant, nearest
from toolkit.linting.registry import rule

_PEFT = "peft 0.21.2"


def methods() -> list[str]:
    """Every peft_type."""
    return ["LORA", *(name for name in keys.package("peft")["sections"] if name not in ("", "task_types"))]


@rule(
    "LR812",
    "error",
    source=f"{_PEFT} config.py:from_peft_type (KeyError)",
    fails=lora(peft_type="LORAA"),
    passes=lora(),
)
def no_such_method(context: LintContext) -> Iterator[Diagnostic]:
    """A peft_type that PEFT does not have."""
    setting = context.lora_key("peft_type")
    if setting is not None and setting.value is not None and setting.value not in methods():
        near = nearest(str(setting.value), methods(), 0.6)
        sure = near is not None and near == str(setting.value).upper()
        fix = set_value(setting, near) if sure else None
        yield Diagnostic(setting, f"PEFT has no method {setting.value!r}{meant(near)}", fix)


@rule(
    "LR813",
    "error",
    source=f"{_PEFT} tuners/tuners_utils.py:_mark_only_adapters_as_trainable (NotImplementedError)",
    fails=lora(bias="lora"),
    passes=lora(bias="none"),
)
def no_such_bias(context: LintContext) -> Iterator[Diagnostic]:
    """A LoRA bias other than none, all and lora_only."""
    setting = context.lora_key("bias")
    if setting is None or setting.value is None or context.peft.get("peft_type", "LORA") != "LORA":
        return
    if setting.value not in ("none", "all", "lora_only"):
        yield Diagnostic(setting, f"{setting.value!r} is not none, all or lora_only")


@rule(
    "LR814",
    "error",
    source=f"{_PEFT} config.py:PeftConfig.__post_init__ (ValueError)",
    fails=lora(task_type="CAUSAL"),
    passes=lora(task_type="CAUSAL_LM"),
)
def no_such_task(context: LintContext) -> Iterator[Diagnostic]:
    """A task_type that PEFT does not have."""
    setting, known = context.lora_key("task_type"), list(keys.section("peft", "task_types"))
    if setting is not None and setting.value is not None and setting.value not in known:
        near = nearest(str(setting.value), known, 0.5)
        fix = set_value(setting, near) if near and near == str(setting.value).upper() else None
        yield Diagnostic(setting, f"PEFT has no task_type {setting.value!r}{meant(near)}", fix)


@rule(
    "LR815",
    "error",
    source=f"{_PEFT} tuners/lora/layer.py:update_layer (TypeError: the values are compared and divided as they are)",
    fails=lora(r="16"),
    passes=lora(r=16),
)
def adapter_number(context: LintContext) -> Iterator[Diagnostic]:
    """A number of a LoRA config that is text, or a rank that is not whole."""
    if context.peft.get("peft_type", "LORA") != "LORA":
        return
    for key in ("r", "lora_alpha", "lora_dropout"):
        setting = context.lora_key(key)
        if setting is None or setting.value is None or (number(setting.value) and (key != "r" or whole(setting.value))):
            continue
        text = setting.value if isinstance(setting.value, str) else ""
        fix = set_value(setting, int(text)) if text.isdigit() and key != "lora_dropout" else None
        expected = "a whole number" if key == "r" else "a number"
        yield Diagnostic(setting, f"{setting.value!r} is not {expected}", fix)


@rule(
    "LR816",
    "error",
    source=f"{_PEFT} tuners/oft/config.py:OFTConfig.__post_init__ (ValueError)",
    fails={ADAPTER: '{\n  "peft_type": "OFT",\n  "r": 8,\n  "oft_block_size": 32\n}\n'},
    passes={ADAPTER: '{\n  "peft_type": "OFT",\n  "oft_block_size": 32\n}\n'},
)
def two_sizes_of_oft(context: LintContext) -> Iterator[Diagnostic]:
    """OFT with both r and oft_block_size, or with neither: each follows from the other."""
    rank, block = context.lora_key("r"), context.lora_key("oft_block_size")
    if context.peft.get("peft_type") != "OFT" or rank is None or not number(rank.value):
        return
    size = block.value if block is not None else 32
    if rank.value and size:
        shown = f"oft_block_size {size}" + ("" if block is not None else ", its default")
        yield Diagnostic(rank, f"r {rank.value} and {shown}: PEFT accepts one of them, the other must be 0")
    elif not rank.value and not size:
        yield Diagnostic(rank, "r and oft_block_size are both 0: PEFT needs one of them")
