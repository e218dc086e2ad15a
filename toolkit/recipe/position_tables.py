"""How a model's code knows positions, read from its syntax tree: tables that end, rotations that do not, or neither.

A table is a module with a row for each position: an ``nn.Embedding`` (or a class of the same file that derives from
it), or a buffer that a function of the file fills, whose size is a position count of the config. Its name does not
matter, and no model is named here. Nothing is executed, and torch is not imported.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POSITION_KEYS = re.compile(
    r"n_positions|block_size|max_seq_len|max_positions?|max_(source|target|encoder|decoder)_positions"
    r"|max_(?:(source|target|encoder|decoder)_)?position_embeddings"
)
"""Names that configs have for a number of positions."""

Lookup = Callable[[str], Any]
"""The value of a key of the config, with its class's default; None where neither has one."""


@dataclass(frozen=True)
class Condition:
    """``if`` around a table: whether ``key`` of the config equals ``value`` (None: whether it is true) is ``holds``."""

    key: str
    value: Any
    holds: bool

    def met(self, lookup: Lookup) -> bool:
        """Whether it is met; a key that no config has leaves it open, and counts as met."""
        found = lookup(self.key)
        if found is None:
            return True
        return (bool(found) if self.value is None else found == self.value) == self.holds


@dataclass(frozen=True)
class Table:
    """Positions that end. ``key``: the number of rows in the config; ``owner``: the class that makes it;
    ``behind_padding``: rows up to the padding token's id are never a position's, as the first one is ``padding_idx +
    1`` (RoBERTa and its kin)."""

    key: str
    owner: str
    behind_padding: bool
    conditions: tuple[Condition, ...] = ()


@dataclass(frozen=True)
class PositionCode:
    """What one file of a model's code says of positions."""

    tables: tuple[Table, ...]
    rotates: bool
    """Whether positions are rotations of queries and keys."""


@functools.cache
def position_code(source: Path) -> PositionCode:
    """Read ``source``, a ``modeling_*.py``."""
    text = source.read_text(encoding="utf-8")
    tree = ast.parse(text)
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    embeddings = _embeddings(classes)
    # The function that counts positions from the padding token on: transformers copies it from model to model.
    counted = "def create_position_ids_from_input_ids" in text
    tables = []
    for name, node in classes.items():
        if not _grows(node):
            tables += list(_Tables(name, node, embeddings, functions, counted).found())
    rotates = any("Rotary" in name for name in classes) or "def apply_rotary" in text or "def rotate_half" in text
    return PositionCode(tuple(dict.fromkeys(tables)), rotates)


def _embeddings(classes: Mapping[str, ast.ClassDef]) -> set[str]:
    """Classes that are an ``nn.Embedding`` of a fixed size, with that name itself."""
    embeddings = {"Embedding"}
    while True:
        derived = {
            name
            for name, node in classes.items()
            if any(_last(base) in embeddings for base in node.bases) and not _grows(node)
        }
        if derived <= embeddings:
            return embeddings
        embeddings |= derived


def _grows(node: ast.ClassDef) -> bool:
    """Whether a table's ``forward`` compares its size with what it is asked for, and makes a larger one (FSMT)."""
    forwards = (method for method in node.body if isinstance(method, ast.FunctionDef) and method.name == "forward")
    compared = (inner for method in forwards for inner in ast.walk(method) if isinstance(inner, ast.Compare))
    return any(_dotted(inner).startswith("self.weight.") for one in compared for inner in ast.walk(one))


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _last(node: ast.expr) -> str:
    """The last part of a dotted name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


@dataclass
class _Tables:
    owner: str
    node: ast.ClassDef
    embeddings: set[str]
    functions: set[str]
    counted: bool

    def found(self) -> Iterator[Table]:
        aliases: dict[str, str] = {}
        for statement in ast.walk(self.node):
            if isinstance(statement, ast.Assign) and (key := self._key(statement.value, aliases)) is not None:
                aliases |= {_last(target): key for target in statement.targets}
        for call, conditions in _calls(self.node.body, (), aliases):
            if (key := self._rows(call, aliases)) is not None:
                behind = self.counted and any(keyword.arg == "padding_idx" for keyword in call.keywords)
                yield Table(key, self.owner, behind, conditions)

    def _rows(self, call: ast.Call, aliases: Mapping[str, str]) -> str | None:
        """The config's key for the number of rows that ``call`` makes; None if it makes no table of positions."""
        name = _last(call.func)
        named = [keyword.value for keyword in call.keywords if keyword.arg == "num_embeddings"]
        arguments = [*call.args[:1], *named]
        # A table's own class may size itself (ProphetNet); where others size it, ``super`` gets no key of the config.
        if (name in self.embeddings or (name == "__init__" and self.owner in self.embeddings)) and arguments:
            key = self._key(arguments[0], aliases)
            return key if key is not None and POSITION_KEYS.fullmatch(key) else None
        if name in ("Buffer", "register_buffer"):
            filled = (inner for value in call.args for inner in ast.walk(value) if isinstance(inner, ast.Call))
            for inner in filled:
                if _last(inner.func) in self.functions and inner.args:
                    key = self._key(inner.args[0], aliases)
                    if key is not None and POSITION_KEYS.fullmatch(key):
                        return key
        return None

    def _key(self, node: ast.expr, aliases: Mapping[str, str]) -> str | None:
        """The key that an expression takes from the config: ``config.KEY``, an attribute that was assigned it, or
        either with a constant added."""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self._key(node.left, aliases)
        if isinstance(node, ast.Call) and _last(node.func) == "getattr" and len(node.args) > 1:
            name = node.args[1]
            return name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else None
        if isinstance(node, ast.Name):
            return aliases.get(node.id)
        if not isinstance(node, ast.Attribute):
            return None
        if _last(node.value) in ("config", "text_config"):
            return node.attr
        return aliases.get(node.attr) if _last(node.value) == "self" else None


def _calls(
    body: list[ast.stmt], conditions: tuple[Condition, ...], aliases: Mapping[str, str]
) -> Iterator[tuple[ast.Call, tuple[Condition, ...]]]:
    """Calls in statements, each with what is asked of the config around it."""
    for statement in body:
        if isinstance(statement, ast.If):
            condition = _condition(statement.test, aliases)
            inside = conditions if condition is None else (*conditions, condition)
            yield from _calls(statement.body, inside, aliases)
            turned = [] if condition is None else [Condition(condition.key, condition.value, not condition.holds)]
            yield from _calls(statement.orelse, (*conditions, *turned), aliases)
            continue
        if isinstance(statement, ast.FunctionDef | ast.For | ast.With):
            yield from _calls(statement.body, conditions, aliases)
            continue
        yield from ((node, conditions) for node in ast.walk(statement) if isinstance(node, ast.Call))


def _condition(test: ast.expr, aliases: Mapping[str, str]) -> Condition | None:
    """What a test asks of the config; None where it asks something else."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _condition(test.operand, aliases)
        return None if inner is None else Condition(inner.key, inner.value, not inner.holds)
    if isinstance(test, ast.Attribute):
        key = test.attr if _last(test.value) == "config" else aliases.get(test.attr)
        return None if key is None else Condition(key, None, True)
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.comparators[0], ast.Constant):
        inner = _condition(test.left, aliases)
        if inner is not None and isinstance(test.ops[0], ast.Eq | ast.NotEq):
            return Condition(inner.key, test.comparators[0].value, isinstance(test.ops[0], ast.Eq))
    return None
