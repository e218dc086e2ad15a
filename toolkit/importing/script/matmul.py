"""Whether a script has its float32 products computed in TF32."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from toolkit.importing.draft import Written
from toolkit.importing.script.setting import Settings
from toolkit.importing.script.source import Argument
from toolkit.importing.script.trainers import ARGUMENTS

_IN_TF32 = ("high", "medium", "tf32")
"""Of ``torch.set_float32_matmul_precision`` and of ``fp32_precision``; the other values are «highest» and «ieee»."""


def read_matmul(settings: Settings) -> None:
    """``TrainingArguments(tf32=True)``, ``torch.backends.cuda.matmul.allow_tf32 = True``, the ``fp32_precision`` that
    torch has in its place since 2.9, of all backends or of matmul, and ``torch.set_float32_matmul_precision``: the last
    one in the text counts."""
    for argument in sorted(_switches(settings), key=lambda argument: argument.line):
        if argument.unread:
            settings.assume(f"float32 products without TF32: line {argument.line}: {argument.unread}")
            continue
        on = argument.value is True or argument.value in _IN_TF32
        settings.habits.pop("tf32", None)
        if on:
            settings.habits["tf32"] = Written("true", settings.script.place(argument.line))


def _switches(settings: Settings) -> Iterator[Argument]:
    script = settings.script
    for call in script.called(*ARGUMENTS):
        if "tf32" in call.arguments:
            yield call.arguments["tf32"]
    for call in script.called("set_float32_matmul_precision"):
        if call.node.args:
            yield script.argument(call.node.args[0])
        elif "precision" in call.arguments:
            yield call.arguments["precision"]
    for node in script.names.scopes:
        if isinstance(node, ast.Assign) and any(_is_switch(target) for target in node.targets):
            yield script.argument(node.value)


def _is_switch(target: ast.expr) -> bool:
    return (
        isinstance(target, ast.Attribute)
        and target.attr in ("allow_tf32", "fp32_precision")
        and not {"cudnn", "conv", "rnn", "mkldnn"} & set(ast.unparse(target).split("."))
    )
