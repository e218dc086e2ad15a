"""The classes of a model's repeated blocks (what FSDP wraps and checkpointing recomputes), read from the source of the
class that its task builds. Nothing is executed, and nothing heavy is imported.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from toolkit.recipe.model_facts import ModelFacts, auto_class_of, model_sources

_MARK = "_no_split_modules"
_BLOCK = "GradientCheckpointingLayer"
_WHOLE = "config"


def block_classes(facts: ModelFacts, auto_class: str, whole: bool = True) -> tuple[str, ...]:
    """Names of the model's repeated block classes, or () if they are not known.

    ``auto_class`` (of transformers) decides which model a config stands for: Qwen3.5's is the whole model with its
    vision tower for one, and the text alone for another (``whole``: a class may hand its config on). Its constructor
    is followed to every class that it builds.

    transformers marks blocks twice: ``_no_split_modules`` (which also names embeddings) and the base class
    ``GradientCheckpointingLayer``. Blocks are the classes in both and those of the second beside them (SpeechToText
    names the blocks of its encoder alone), else those of the second, else those of the first, else the one that lists
    of modules are filled with (XLM keeps attentions, norms and products in a list each: no blocks). A part that an auto
    class makes (``AutoModel.from_config``) has blocks of its own, by its config.
    """
    name = auto_class_of(facts, auto_class)
    sources = model_sources(facts, name)
    blocks: list[str] = []
    for source in [source for source in sources if name in _code(source).classes] or sources:
        own, parts = _found_in(source, name)
        blocks += own
        for key, made_of in parts:
            if key != _WHOLE and (part := facts.part(key)) is not None:
                blocks += block_classes(part, made_of)
            elif key == _WHOLE and whole:
                blocks += block_classes(facts, made_of, whole=False)
        if blocks:
            break
    return tuple(dict.fromkeys(blocks))


@dataclass(frozen=True)
class _Code:
    """A modeling file: its classes, and the names that a table of the module stands for (``ATTENTION_CLASSES``)."""

    classes: dict[str, ast.ClassDef]
    tables: dict[str, tuple[str, ...]]

    def bases(self, name: str) -> list[str]:
        """A class and those of its bases that are in the file, nearest first."""
        node = self.classes[name]
        own = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in self.classes]
        return [name, *(one for base in own for one in self.bases(base))]

    def constructor(self, name: str) -> list[ast.stmt]:
        """What runs when a class is made: its ``__init__``, and that of the base which it calls; every method that
        these call of ``self`` too."""
        statements: list[ast.stmt] = []
        for one in self.bases(name):
            methods = {node.name: node for node in self.classes[one].body if isinstance(node, ast.FunctionDef)}
            init = methods.get("__init__")
            if init is None:
                continue
            statements.append(init)
            statements += [methods[called] for called in _own_calls(init) if called in methods]
            if not _calls_super(init):
                break
        return statements

    def named(self, name: str) -> Iterator[str]:
        """The classes that a class's constructor names, directly or by a table."""
        for statement in self.constructor(name):
            for node in ast.walk(statement):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                    yield from (one for one in (node.id, *self.tables.get(node.id, ())) if one in self.classes)

    def built(self, start: str) -> tuple[str, ...]:
        """``start`` and all that its constructor builds, in the order of building."""
        order: dict[str, None] = {}
        left = [start]
        while left:
            name = left.pop(0)
            if name not in order:
                order[name] = None
                left = [*self.named(name), *left]
        return tuple(order)

    def blocks(self, built: tuple[str, ...]) -> list[str]:
        marked = [one for name in built for owner in self.bases(name) for one in _marks(self.classes[owner])]
        marked = [name for name in dict.fromkeys(marked) if name in built]
        recomputed = [name for name in built if _is_block(self.classes[name])]
        both = [name for name in marked if name in recomputed]
        inside = {name: set(self.built(name)) for name in recomputed}
        beside = [r for r in recomputed if not any(r in inside[one] or one in inside[r] for one in both)]
        return [*both, *beside] or marked or [one for name in built for one in self.listed(name)]

    def listed(self, name: str) -> set[str]:
        """The class whose instances fill the lists of modules that a class makes; of several, none."""
        fills: set[str] = set()
        for statement in self.constructor(name):
            for node in ast.walk(statement):
                if isinstance(node, ast.Call) and getattr(node.func, "attr", None) in ("ModuleList", "append"):
                    made = (inner.func for inner in ast.walk(node) if isinstance(inner, ast.Call))
                    fills |= {one.id for one in made if isinstance(one, ast.Name) and one.id in self.classes}
        return fills if len(fills) == 1 else set()

    def parts(self, built: tuple[str, ...]) -> Iterator[tuple[str, str]]:
        """The keys of nested configs that an auto class makes a model of, each with that auto class. A class that makes
        nothing by itself (``GenericForTokenClassification``) has the base model of the whole config."""
        if built and not self.constructor(built[0]):
            yield _WHOLE, "AutoModel"
        for name in built:
            for statement in self.constructor(name):
                for node in ast.walk(statement):
                    if isinstance(node, ast.Call) and (made := _auto_part(node)) is not None:
                        yield made


@functools.cache
def _code(source: Path) -> _Code:
    module = ast.parse(source.read_text(encoding="utf-8"))
    body = module.body
    classes = {node.name: node for node in ast.walk(module) if isinstance(node, ast.ClassDef)}
    tables = {
        target.id: tuple(name.id for name in ast.walk(node.value) if isinstance(name, ast.Name) and name.id in classes)
        for node in body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return _Code(classes, tables)


@functools.cache
def _found_in(source: Path, name: str | None) -> tuple[list[str], list[tuple[str, str]]]:
    """Blocks and parts of what the class ``name`` builds, or of all classes where the file does not have it. A plan
    asks for every candidate, and walking over a file's code takes 30 ms."""
    code = _code(source)
    built = code.built(name) if name in code.classes else tuple(code.classes)
    return code.blocks(built), list(code.parts(built))


def _marks(node: ast.ClassDef) -> list[str]:
    for statement in node.body:
        if isinstance(statement, ast.Assign) and any(getattr(t, "id", None) == _MARK for t in statement.targets):
            try:
                return list(ast.literal_eval(statement.value) or [])
            except ValueError:
                return []  # computed at run time: the other mark decides
    return []


def _is_block(node: ast.ClassDef) -> bool:
    return any(isinstance(base, ast.Name) and base.id == _BLOCK for base in node.bases)


def _own_calls(method: ast.FunctionDef) -> list[str]:
    """The methods of ``self`` that it calls."""
    called = (node.func for node in ast.walk(method) if isinstance(node, ast.Call))
    return [func.attr for func in called if isinstance(func, ast.Attribute) and getattr(func.value, "id", "") == "self"]


def _calls_super(init: ast.FunctionDef) -> bool:
    calls = (node.func for node in ast.walk(init) if isinstance(node, ast.Call))
    return any(
        isinstance(func, ast.Attribute) and func.attr == "__init__" and isinstance(func.value, ast.Call)
        for func in calls
    )


def _auto_part(call: ast.Call) -> tuple[str, str] | None:
    """``AutoModel.from_config(config.vision_config)`` as (vision_config, AutoModel); None for another call."""
    func, given = call.func, [*call.args, *(word.value for word in call.keywords if word.arg == "config")]
    if not (isinstance(func, ast.Attribute) and func.attr in ("from_config", "_from_config") and given):
        return None
    if not (isinstance(func.value, ast.Name) and func.value.id.startswith("AutoModel")):
        return None
    return getattr(given[0], "attr", getattr(given[0], "id", "")), func.value.id
