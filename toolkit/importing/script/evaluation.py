"""The evaluation inside a script's run: rows of a batch, and batches whose logits stay on the device."""

from __future__ import annotations

from toolkit.importing.draft import Written
from toolkit.importing.script.own_loop import evaluating_loaders
from toolkit.importing.script.setting import Settings
from toolkit.importing.script.source import Argument, Call
from toolkit.importing.script.trainers import ARGUMENTS, trainer_call

_DEFAULT_ROWS = 8
"""transformers 5.23.0, training_args.py, ``per_device_eval_batch_size``."""


def read_evaluation(settings: Settings) -> None:
    """Note ``eval_micro`` and ``eval_kept``, where the script evaluates while it trains."""
    given = settings.script.called(*ARGUMENTS)
    if settings.loop not in ("trainer", "trl"):
        _of_a_loop(settings)
    elif given and _evaluates(settings, given[-1]):
        _of_a_trainer(settings, given[-1])


def _evaluates(settings: Settings, call: Call) -> bool:
    """Whether the Trainer's arguments turn evaluation on, or the script calls ``trainer.evaluate()``."""
    if any("trainer" in evaluate.owner.lower() for evaluate in settings.script.called("evaluate")):
        return True
    for key in ("eval_strategy", "evaluation_strategy", "do_eval"):
        argument = call.arguments.get(key)
        if argument is None:
            continue
        if argument.unread:
            settings.miss("eval_micro", argument.line, f"{key}: {argument.unread}")
        elif argument.value not in ("no", False, None):
            return True
    return False


def _of_a_trainer(settings: Settings, call: Call) -> None:
    rows = call.arguments.get("per_device_eval_batch_size")
    if rows is None:
        settings.assume(f"--loop-set eval_micro {_DEFAULT_ROWS}: the default of per_device_eval_batch_size")
        rows = Argument(_DEFAULT_ROWS, call.line)
    _take(settings, "eval_micro", rows)
    trainer = trainer_call(settings.script)
    words = {} if trainer is None else trainer.arguments
    measured = trainer is not None and any(
        word.arg == "compute_metrics" and _is_something(words["compute_metrics"]) for word in trainer.node.keywords
    )
    if settings.loop == "trl" or not measured or _is_true(call, "prediction_loss_only"):
        return  # the loss alone is wanted: Trainer.evaluate; TRL's outputs have no logits
    if "preprocess_logits_for_metrics" in words:
        settings.assume("preprocess_logits_for_metrics leaves little of the logits of an evaluation")
    elif _is_true(call, "batch_eval_metrics"):
        settings.habits["eval_kept"] = Written("1", settings.script.place(call.line))
    elif "eval_accumulation_steps" in call.arguments:
        _take(settings, "eval_kept", call.arguments["eval_accumulation_steps"])
    else:
        reason = "compute_metrics has the logits of all held-out rows on the device, whose number is not in the script"
        settings.miss("eval_kept", words["compute_metrics"].line, reason)


def _is_something(argument: Argument) -> bool:
    """Whether an argument is anything but the value None."""
    return bool(argument.unread) or argument.value is not None


def _is_true(call: Call, name: str) -> bool:
    return name in call.arguments and call.arguments[name].value is True


def _of_a_loop(settings: Settings) -> None:
    loaders = evaluating_loaders(settings.script)
    if not loaders or not settings.script.called("eval", "no_grad", "inference_mode"):
        return
    _take(settings, "eval_micro", loaders[0].arguments["batch_size"])
    settings.assume("the logits of an evaluation do not stay from batch to batch (--loop-set eval_kept=BATCHES)")


def _take(settings: Settings, key: str, argument: Argument) -> None:
    if argument.unread or not isinstance(argument.value, int):
        settings.miss(key, argument.line, argument.unread or f"{argument.value} is no number of rows")
        return
    settings.habits[key] = Written(str(argument.value), settings.script.place(argument.line))
    for default in argument.defaults:
        settings.assume(f"--loop-set {key} {argument.value}: the default of {default}")
