"""The adapter of a script, and the recomputation that its model is told to do."""

from __future__ import annotations

import ast

from toolkit.importing.draft import Written
from toolkit.importing.script.setting import Settings
from toolkit.importing.script.source import Call
from toolkit.importing.script.trainers import ARGUMENTS, TRAINERS
from toolkit.importing.script.values import Unreadable

_LORA = {"r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "use_dora": "use_dora",
         "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save",
         "use_rslora": "use_rslora", "target_parameters": "lora_target_parameters"}  # fmt: skip


def read_adapter(settings: Settings) -> None:
    script = settings.script
    uses = [
        *((call, _word(call, "peft_config", 1)) for call in script.called("get_peft_model")),
        *((call, _word(call, "adapter_config", 0)) for call in script.called("add_adapter")),
        *((call, _word(call, "peft_config", None)) for call in script.called(*TRAINERS)),
    ]
    for call, node in uses:
        if node is None:
            continue
        config = _config(settings, call, node)
        if config is not None:
            _lora(settings, config)
            return
    if settings.on("load_in_4bit") and "use_peft" not in settings.unread:
        settings.miss("use_peft", None, "weights are loaded in 4 bits, and no adapter is added to them")


def _word(call: Call, name: str, position: int | None) -> ast.expr | None:
    node = next((word.value for word in call.node.keywords if word.arg == name), None)
    if node is None and position is not None and len(call.node.args) > position:
        node = call.node.args[position]
    return node


def _config(settings: Settings, call: Call, node: ast.expr) -> Call | None:
    try:
        config = settings.script.resolved(node)
    except Unreadable as error:
        made = settings.script.called("LoraConfig")
        if len(made) != 1:
            settings.miss("use_peft", call.line, str(error))
            return None
        settings.assume(f"the adapter of line {made[0].line} is used: {error}")
        config = made[0]
    if config is not None and config.last != "LoraConfig":
        settings.miss("use_peft", config.line, f"{config.last} is not read")
        return None
    return config


def _lora(settings: Settings, config: Call) -> None:
    settings.set("use_peft", True, config.line)
    for name, key in _LORA.items():
        if name in config.arguments:
            settings.take(key, config.arguments[name])
    if config.open:
        for name in {"r", "target_modules"} - config.arguments.keys():
            settings.miss(_LORA[name], config.line, f"LoraConfig(**...): {config.open}")


def read_checkpointing(settings: Settings) -> None:
    """``model.gradient_checkpointing_enable()``, and what `prepare_model_for_kbit_training` does beside its dtypes."""
    script = settings.script
    kwargs: list[Call] = []
    prepared = script.called("prepare_model_for_kbit_training")
    if prepared:
        settings.habits["prepare_for_kbit"] = Written("true", script.place(prepared[0].line))
        switch = prepared[0].arguments.get("use_gradient_checkpointing")
        if switch is not None and switch.unread:
            settings.take("gradient_checkpointing", switch)
        elif switch is None or switch.value:
            settings.set("gradient_checkpointing", True, prepared[0].line)
        kwargs += prepared
    enabled = script.called("gradient_checkpointing_enable", "activation_checkpointing_enable")
    if enabled:
        settings.set("gradient_checkpointing", True, enabled[0].line)
        settings.unread.pop("gradient_checkpointing", None)
        kwargs += enabled
    kwargs += script.called(*ARGUMENTS)
    for call in kwargs:
        given = call.arguments.get("gradient_checkpointing_kwargs") or call.arguments.get(
            "activation_checkpointing_kwargs"
        )
        if given is None or (given.value is None and not given.unread):
            continue
        reentrant = given.value.get("use_reentrant") if isinstance(given.value, dict) else None
        if not isinstance(reentrant, bool):
            settings.miss("reentrant", given.line, given.unread or "use_reentrant is known only when the script runs")
        else:
            settings.habits["reentrant"] = Written(str(reentrant).lower(), script.place(given.line))
