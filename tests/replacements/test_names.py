"""Private names of other packages are used in `toolkit/upstream` alone, where each says why and what is done without.

Read from the syntax trees: imports, attributes of modules, attributes that nothing in their file defines, their names
as strings for ``getattr`` and its like, and methods that replace a private one of another package's class.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
BY_NAME = {"getattr", "setattr", "hasattr", "delattr", "object"}
"""Functions whose second argument names an attribute; ``object``: of ``mock.patch``."""
NAMED_TUPLE = {"_asdict", "_replace", "_fields", "_make"}
ALSO_OURS = {"_handle", "_scale", "_apply"}
"""Private names of other packages' objects that the toolkit gives to something of its own, too."""


def private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def foreign(module: str) -> bool:
    top = module.partition(".")[0]
    return top not in sys.stdlib_module_names and top not in ("toolkit", "__future__")


def defined(tree: ast.AST) -> set[str]:
    """Names that a file gives to something of its own."""
    made = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            made.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            made.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and own(node.value):
            made.add(node.attr)
    return made


def own(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of a chain of attributes, "" of another expression."""
    if isinstance(node, ast.Name):
        return node.id
    base = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{base}.{node.attr}" if base and isinstance(node, ast.Attribute) else ""


def root(node: ast.AST) -> str:
    """The name that an expression of attributes, calls and subscripts begins with."""
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def imported(tree: ast.AST) -> dict[str, str]:
    """What each name that a file imports stands for."""
    meant = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            meant |= {a.asname or a.name.partition(".")[0]: a.name if a.asname else a.name.partition(".")[0]
                      for a in node.names}  # fmt: skip
        elif isinstance(node, ast.ImportFrom) and node.module:
            meant |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return meant


def uses(tree: ast.AST, everywhere: set[str]) -> Iterator[tuple[int, str]]:
    """Line and name of each use. ``everywhere``: names that the toolkit defines, which ``self`` may have."""
    meant, here = imported(tree), defined(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            for name in (f"{module}.{a.name}" if module else a.name for a in node.names):
                if foreign(name) and private(name):
                    yield node.lineno, name
        elif isinstance(node, ast.Attribute) and private(node.attr) and node.attr not in NAMED_TUPLE:
            first, _, rest = dotted(node).partition(".")
            module = meant.get(root(node))
            if first in meant:
                if foreign(meant[first]):
                    yield node.lineno, f"{meant[first]}.{rest}"
            elif (module is None or foreign(module)) and not (
                node.attr in here or (node.attr in everywhere and (own(node.value) or node.attr not in ALSO_OURS))
            ):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] in BY_NAME and len(node.args) > 1:
            name = node.args[1]
            if isinstance(name, ast.Constant) and private(str(name.value)) and name.value not in here | NAMED_TUPLE:
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.ClassDef):
            for base in filter(None, map(dotted, node.bases)):
                first, _, rest = base.partition(".")
                if first in meant and foreign(meant[first]):
                    for name in defined(node):
                        if private(name) and hasattr(_resolved(".".join(filter(None, (meant[first], rest)))), name):
                            yield node.lineno, f"{base}.{name}"


def _resolved(name: str) -> object:
    module, _, last = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), last)
    except ImportError:  # a class inside a class, or a module behind an attribute
        return getattr(_resolved(module), last)


def private_uses() -> list[str]:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "toolkit").rglob("*.py"))}
    everywhere = set().union(*map(defined, trees.values()))
    return [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path, tree in trees.items()
        if path.parent.name != "upstream"
        for line, name in uses(tree, everywhere)
    ]


def test_each_kind_of_use_is_seen() -> None:
    source = """
import torch
from torch._dynamo import counters
from torch import nn
class Layer(nn.Module):
    def _apply(self, fn): self._mine = fn; self._buffers
torch._scaled_mm
model._get_dtype_plan
getattr(model, "_loss_function", None)
mock.patch.object(model, "_shared")
layer._mine
layer.weight
"""
    seen = {name for _, name in uses(ast.parse(source), {"_mine"})}
    assert seen == {
        "torch._dynamo.counters", "nn.Module._apply", "self._buffers", "torch._scaled_mm", "model._get_dtype_plan",
        "getattr(model, '_loss_function', None)", "mock.patch.object(model, '_shared')",
    }  # fmt: skip


def test_private_names_of_other_packages_are_in_upstream_alone() -> None:
    seen = private_uses()
    assert not seen, "\n".join(seen)
