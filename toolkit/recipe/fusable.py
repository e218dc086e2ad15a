"""Whether a model's loss can be computed from its hidden states and head alone, determined from its source code."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from toolkit.recipe.model_facts import ModelFacts, auto_class_of, model_sources
from toolkit.recipe.schema import Recipe

_AUTO_CLASS = "AutoModelForCausalLM"
_LOGITS = ("logits", "lm_logits")
_HEADS = ("lm_head", "embed_out", "output_projection", "lm_head.default")
_HARMLESS = ("float", "to", "contiguous")


def why_not_fusable(recipe: Recipe, facts: ModelFacts) -> str | None:
    """Why ``loss: fused`` would not equal the model's loss, or None."""
    if recipe.model.task != "causal-lm":
        return f"requires model.task: causal-lm; here it is {recipe.model.task}"
    if recipe.precision == "fp16":
        return "computes the head's gradient before the loss scale is known, and in fp16 it would underflow; use bf16"
    targets = recipe.adapter.target_modules if recipe.adapter else []
    if isinstance(targets, list) and (named := [name for name in targets if name.split(".")[-1] in _HEADS]):
        return f"requires a head without an adapter, but adapter.target_modules contains {named[0]}"
    if facts.config is None:
        return f"needs to read the model's code, but {facts.why_unknown}"
    name = auto_class_of(facts, _AUTO_CLASS)
    changes = [change for source in model_sources(facts) for change in _changes(source, name)]
    if None not in (how for how, *_ in changes):
        return f"requires a plain call of the head; the code of {facts.model_type} has none"
    for how, keys, switch in changes:
        if how is not None and not _never(facts, keys, switch):
            return f"does not support {facts.model_type}, which changes the logits after the head: {how}"
    return None


def _never(facts: ModelFacts, keys: tuple[str, ...], switch: bool) -> bool:
    """Whether a change does nothing with the value that is in force: None, False or 0, or a factor of 1."""
    if not keys:
        return False
    for key in keys[:-1]:
        if key not in ("text_config", "get_text_config"):
            return False
        facts = facts.text
    value = facts.value(keys[-1])
    return value is None or value == 0 if switch else value == 1


_Change = tuple[str | None, tuple[str, ...], bool]
"""A statement that changes logits, None for the call of the head; the path in the config of the value that it depends
on; and whether that one switches it on, or is what it multiplies or divides by."""


@cache
def _changes(source: Path, name: str | None) -> tuple[_Change, ...]:
    """The statements of the forward of class ``name`` that compute or change logits; None: of every causal model of
    the file."""
    found: list[_Change] = []
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and (
            node.name == name if name else node.name.endswith(("ForCausalLM", "LMHeadModel"))
        ):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and inner.name == "forward":
                    _walk(inner.body, (), found)
    return tuple(found)


def _walk(body: list[ast.stmt], keys: tuple[str, ...], found: list[_Change]) -> None:
    for statement in body:
        if isinstance(statement, ast.If):
            _walk(statement.body, _config_keys(statement.test) or keys, found)
            _walk(statement.orelse, keys, found)
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if isinstance(statement, ast.AugAssign | ast.AnnAssign):
            targets = [statement.target]
        if any(isinstance(target, ast.Name) and target.id in _LOGITS for target in targets):
            found.append(_change(statement, keys))


def _change(statement: ast.stmt, keys: tuple[str, ...]) -> _Change:
    value = getattr(statement, "value", None)
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _HARMLESS:
        value = value.func.value
    if isinstance(statement, ast.Assign):
        if isinstance(value, ast.Name) and value.id in _LOGITS:
            return None, (), True
        called = value.func if isinstance(value, ast.Call) else None
        if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == "self":
            return None, (), True
    if not keys and isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div | ast.Mult):
        return ast.unparse(statement), _config_keys(value.right), False
    return ast.unparse(statement), keys, True


def _config_keys(test: ast.expr) -> tuple[str, ...]:
    """The path behind ``self.config`` of the first value of the config that a test reads."""
    for node in ast.walk(test):
        path: list[str] = []
        while isinstance(node, ast.Attribute | ast.Call):
            if isinstance(node, ast.Call):
                node = node.func
                continue
            if node.attr == "config" and path:
                return tuple(reversed(path))
            path.append(node.attr)
            node = node.value
    return ()
