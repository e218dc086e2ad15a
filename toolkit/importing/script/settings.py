"""What a script's calls say of its training, under the names of the Trainer's arguments and of TRL's `sft`: the tables
of `toolkit import` then make a recipe of them."""

from __future__ import annotations

from toolkit.errors import InputError, Place
from toolkit.importing.script.adapter_calls import read_adapter, read_checkpointing
from toolkit.importing.script.evaluation import read_evaluation
from toolkit.importing.script.matmul import read_matmul
from toolkit.importing.script.model_calls import read_model
from toolkit.importing.script.own_loop import own_loop
from toolkit.importing.script.setting import Settings
from toolkit.importing.script.source import Script
from toolkit.importing.script.trainers import ARGUMENTS, trainer_call, trainer_classes


def read_settings(path: str) -> Settings:
    """The settings of the script ``path``. Raises InputError where the file is no script that trains."""
    settings = Settings(Script(path))
    _loop(settings)
    if settings.loop in ("trainer", "trl"):
        _arguments(settings)
    else:
        own_loop(settings)
    read_model(settings)
    read_adapter(settings)
    read_checkpointing(settings)
    _length(settings)
    read_evaluation(settings)
    read_matmul(settings)
    return settings


def _loop(settings: Settings) -> None:
    script = settings.script
    classes, call = trainer_classes(script), trainer_call(script)
    if call is not None:
        name = call.last
        settings.loop = "trl" if classes.get(name, name) == "SFTTrainer" else "trainer"
        if name in classes:
            settings.assume(f"{name}, of the script's own, takes the memory of {classes[name]}")
        return
    if not any(call.last == "backward" for call in script.calls):
        raise InputError.at(
            Place(script.path), None, "no training found: neither a Trainer or SFTTrainer nor a backward() is called"
        )
    settings.loop = "accelerate" if script.called("Accelerator") else "bare"


_NEEDED = ("per_device_train_batch_size", "gradient_accumulation_steps", "optim", "bf16", "gradient_checkpointing")
"""Of ``TrainingArguments`` and ``SFTConfig``: what a plan cannot do without; where the text does not say whether they
are given, they are asked for."""
_READ = (*_NEEDED, "fp16", "activation_checkpointing", "deepspeed", "fsdp", "packing", "max_length")
"""What a plan depends on, where it is there."""
_BESIDE = ("num_train_epochs", "max_steps", "optim_args", "fsdp_config")
"""What is read with them where it can be; else the tool's default stands for it."""
_FORMER = {"max_seq_length": "max_length"}


def _arguments(settings: Settings) -> None:
    script = settings.script
    given = script.called(*ARGUMENTS)
    if not given:
        for key in _NEEDED:
            settings.miss(key, None, "the trainer's arguments are made when the script runs")
        return
    call = given[-1]
    for key in (*_READ, *_FORMER, *_BESIDE):
        argument = call.arguments.get(key)
        if argument is not None and not (argument.unread and key in _BESIDE):
            settings.take(_FORMER.get(key, key), argument)
        elif argument is None and call.open and key in _NEEDED:
            settings.miss(key, call.line, f"{call.last}(**...): {call.open}")


def _length(settings: Settings) -> None:
    """Of SFTConfig, which is read with the other arguments; else where the script's tokenizer cuts rows."""
    if "max_length" in settings.written or "max_length" in settings.unread or settings.loop == "trl":
        return
    script = settings.script
    cut = [call for call in script.calls if "truncation" in call.arguments]
    for calls, name in ((cut, "max_length"), (script.called("from_pretrained"), "model_max_length")):
        given = [call.arguments[name] for call in calls if name in call.arguments]
        values = {(str(argument.value), argument.unread) for argument in given}
        if len(values) > 1:
            settings.miss("max_length", given[0].line, "rows are cut at several lengths")
            return
        if given:
            settings.take("max_length", given[0])
            return
    settings.miss("max_length", None, "no call of a tokenizer with truncation and max_length")
