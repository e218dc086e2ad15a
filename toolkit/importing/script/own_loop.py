"""A loop of the script's own, with accelerate or without: optimizer, batches, accumulation, autocast and outputs."""

from __future__ import annotations

import ast

from toolkit.importing.draft import Written
from toolkit.importing.script.setting import Settings
from toolkit.importing.script.source import Call, Script

_OPTIMIZERS = {
    "AdamW": "adamw_torch", "AdamW8bit": "adamw_8bit", "PagedAdamW8bit": "paged_adamw_8bit",
    "PagedAdamW32bit": "paged_adamw_32bit", "PagedAdamW": "paged_adamw_32bit", "SGD": "sgd", "Lion": "lion_32bit",
    "Lion32bit": "lion_32bit", "AdamWScheduleFree": "schedule_free_adamw",
}  # fmt: skip
"""The Trainer's ``optim`` of a loop's own optimizer, by the name of its class."""
_OTHER_OPTIMIZERS = ("Adam", "Adam8bit", "Adagrad", "Adafactor", "RMSprop", "Muon", "LBFGS", "NAdam", "RAdam",
                     "GaLoreAdamW", "Lion8bit", "SGD8bit")  # fmt: skip
_EVALUATION = ("eval", "val", "test", "dev")


def own_loop(settings: Settings) -> None:
    """Read what a trainer's arguments would say from the calls of a loop."""
    _optimizer(settings)
    _batches(settings)
    _accumulation(settings)
    _autocast(settings)
    _outputs(settings)


def _optimizer(settings: Settings) -> None:
    made = [
        call for call in settings.script.calls if call.last in (*_OPTIMIZERS, *_OTHER_OPTIMIZERS) and call.node.args
    ]
    if not made:
        settings.miss("optim", None, "no optimizer of torch.optim or bitsandbytes is made in the script")
        return
    call = made[0]
    if call.last in _OTHER_OPTIMIZERS:
        settings.miss("optim", call.line, f"plan does not count {call.name}")
        return
    settings.set("optim", _OPTIMIZERS[call.last], call.line)
    momentum = call.arguments.get("momentum")
    if momentum is not None and momentum.unread:
        settings.miss("optim", call.line, f"momentum: {momentum.unread}")
    elif momentum is not None:
        settings.set("optim_args", f"momentum={momentum.value}", momentum.line)
    if call.last in ("AdamW", "SGD"):
        fused = call.arguments.get("fused")
        settings.habits["kernel"] = Written(
            "fused" if fused is not None and fused.value else "foreach", settings.script.place(call.line)
        )


def _batches(settings: Settings) -> None:
    evaluating = evaluating_loaders(settings.script)
    training = [call for call in _loaders(settings.script) if call not in evaluating]
    sizes = {(call.arguments["batch_size"].value, call.arguments["batch_size"].unread) for call in training}
    if not training:
        settings.miss("per_device_train_batch_size", None, "no DataLoader with a batch_size")
    elif len(sizes) > 1:
        lines = " and ".join(str(call.line) for call in training)
        settings.miss("per_device_train_batch_size", training[0].line, f"DataLoaders of several sizes, lines {lines}")
    else:
        settings.take("per_device_train_batch_size", training[0].arguments["batch_size"])


def _loaders(script: Script) -> list[Call]:
    return [call for call in script.called("DataLoader") if "batch_size" in call.arguments]


def evaluating_loaders(script: Script) -> list[Call]:
    """The DataLoaders of held-out rows."""
    return [call for call in _loaders(script) if _evaluates(script, call)]


def _evaluates(script: Script, call: Call) -> bool:
    """Whether a DataLoader is one of held-out rows, by the names of what it is made of and assigned to."""
    words = [ast.unparse(argument).lower() for argument in call.node.args[:1]]
    for values in script.names.assigned.values():
        words += [name.lower() for name, nodes in values.items() if call.node in nodes]
    return any(sign in word for word in words for sign in _EVALUATION)


def _accumulation(settings: Settings) -> None:
    """Of an Accelerator, or the N of ``if step % N == 0: optimizer.step()``."""
    script = settings.script
    accelerators = script.called("Accelerator")
    if accelerators and (given := accelerators[0].arguments.get("gradient_accumulation_steps")) is not None:
        settings.take("gradient_accumulation_steps", given)
        return
    for node in script.names.scopes:
        if isinstance(node, ast.If) and _steps(node) and (divisor := _divisor(node.test)) is not None:
            settings.take("gradient_accumulation_steps", script.argument(divisor))
            return
    if accelerators and (accelerators[0].open or "gradient_accumulation_plugin" in accelerators[0].arguments):
        settings.miss("gradient_accumulation_steps", accelerators[0].line, "a plugin decides when the script runs")
    else:
        settings.assume("batch.accumulation 1: the loop steps after every batch, as far as its text shows")


def _steps(node: ast.If) -> bool:
    inner = (item for statement in node.body for item in ast.walk(statement))
    steps = (item for item in inner if isinstance(item, ast.Call) and getattr(item.func, "attr", "") == "step")
    return any("optim" in ast.unparse(step).lower() for step in steps)


def _divisor(test: ast.expr) -> ast.expr | None:
    products = (item for item in ast.walk(test) if isinstance(item, ast.BinOp) and isinstance(item.op, ast.Mod))
    return next((item.right for item in products), None)


def _autocast(settings: Settings) -> None:
    script = settings.script
    accelerators, contexts = script.called("Accelerator"), script.called("autocast")
    if settings.loop == "accelerate":
        given = accelerators[0].arguments.get("mixed_precision")
        if given is None and accelerators[0].open:
            settings.miss("bf16", accelerators[0].line, f"Accelerator(**...): {accelerators[0].open}")
        elif given is None:
            settings.assume("no mixed precision: the Accelerator names none, and accelerate's config file is not read")
        elif given.unread:
            settings.miss("bf16", given.line, given.unread)
        elif given.value in ("bf16", "fp16"):
            settings.set(given.value, True, given.line)
    elif contexts:
        given = contexts[0].arguments.get("dtype")
        if given is None and len(contexts[0].node.args) > 1:
            given = script.argument(contexts[0].node.args[1])
        if given is not None and given.unread:
            settings.miss("bf16", given.line, given.unread)
        else:  # torch.autocast's own default on a GPU is float16
            half = "bf16" if given is not None and given.value == "bfloat16" else "fp16"
            settings.set(half, True, contexts[0].line)


def _outputs(settings: Settings) -> None:
    """``loss = model(**batch).loss`` and ``del outputs`` hold no outputs through the backward."""
    for node in settings.script.names.scopes:
        if isinstance(node, ast.Attribute) and node.attr == "loss" and isinstance(node.value, ast.Call):
            settings.habits["held_outputs"] = Written("false", settings.script.place(node.lineno))
        deletes = isinstance(node, ast.Delete) and any("output" in ast.unparse(target) for target in node.targets)
        if deletes:
            settings.habits["held_outputs"] = Written("false", settings.script.place(node.lineno))  # type: ignore[attr-defined]
