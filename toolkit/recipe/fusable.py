"""Whether a model's loss can be computed from its hidden states and head alone, determined from its source code."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from toolkit.recipe.model_facts import ModelFacts, model_sources
from toolkit.recipe.schema import Recipe

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
    config = facts.config
    changes = [change for source in model_sources(facts) for change in _changes(source)]
    if None not in (how for how, _ in changes):
        return f"requires a plain call of the head; the code of {facts.model_type} has none"
    for how, key in changes:
        if how is not None and not (key is not None and key in config and config[key] is None):
            return f"does not support {facts.model_type}, which changes the logits after the head: {how}"
    return None


@cache
def _changes(source: Path) -> tuple[tuple[str | None, str | None], ...]:
    """The statements of causal models' forwards that compute or change logits: (None, None) for the call of the head;
    else the statement, and the config key that enables it."""
    found: list[tuple[str | None, str | None]] = []
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name.endswith(("ForCausalLM", "LMHeadModel")):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and inner.name == "forward":
                    _walk(inner.body, None, found)
    return tuple(found)


def _walk(body: list[ast.stmt], key: str | None, found: list[tuple[str | None, str | None]]) -> None:
    for statement in body:
        if isinstance(statement, ast.If):
            _walk(statement.body, _config_key(statement.test) or key, found)
            _walk(statement.orelse, key, found)
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if isinstance(statement, ast.AugAssign | ast.AnnAssign):
            targets = [statement.target]
        if any(isinstance(target, ast.Name) and target.id in _LOGITS for target in targets):
            found.append(_change(statement, key))


def _change(statement: ast.stmt, key: str | None) -> tuple[str | None, str | None]:
    value = getattr(statement, "value", None)
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _HARMLESS:
        value = value.func.value
    if isinstance(statement, ast.Assign):
        if isinstance(value, ast.Name) and value.id in _LOGITS:
            return None, None
        called = value.func if isinstance(value, ast.Call) else None
        if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == "self":
            return None, None
    return ast.unparse(statement), key


def _config_key(test: ast.expr) -> str | None:
    for node in ast.walk(test):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value.attr == "config":
            return node.attr
    return None
