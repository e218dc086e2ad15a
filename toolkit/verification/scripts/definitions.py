"""The classes and functions of a script's main file, without running the script."""

from __future__ import annotations
import __future__

import ast
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_DEFINES = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_HARMLESS = frozenset(
    ("TypeVar", "NewType", "namedtuple", "Path", "logging", "typing", "collections", "pathlib", "re", "os", "math")
)
"""What a constant at the top of a file may call, by the first part of its name."""


def definitions(file: Path) -> dict[str, Any]:
    """What the top of ``file`` names: imports, functions, classes and constants. What needs more is left out.

    A script may train at its top level, so no statement is run that only does something.
    """
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(file), "__builtins__": __builtins__}
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (OSError, SyntaxError, ValueError):
        return names
    futures = [alias.name for one in tree.body if isinstance(one, ast.ImportFrom) for alias in one.names]
    flags = __future__.annotations.compiler_flag if "annotations" in futures else 0
    _run(tree.body, names, str(file), flags)
    return names


def _run(statements: Sequence[ast.stmt], names: dict[str, Any], file: str, flags: int) -> None:
    for one in statements:
        if isinstance(one, _DEFINES) or (isinstance(one, ast.Assign | ast.AnnAssign) and _constant(one.value)):
            # Whatever fails is not defined; what needs it fails to be found.
            with contextlib.suppress(Exception, SystemExit):
                exec(compile(ast.Module([one], []), file, "exec", flags, dont_inherit=True), names)
        elif isinstance(one, ast.Try):
            for handler in one.handlers:
                _run(handler.body, names, file, flags)
            _run([*one.body, *one.orelse, *one.finalbody], names, file, flags)
        elif isinstance(one, ast.If) and not _asks_for_main(one.test):
            _run(_taken(one, names, file), names, file, flags)


def _taken(one: ast.If, names: dict[str, Any], file: str) -> list[ast.stmt]:
    """The branch that the script takes; both, the first one last, where its condition cannot be evaluated here."""
    if _constant(one.test):
        with contextlib.suppress(Exception):
            return one.body if eval(compile(ast.Expression(one.test), file, "eval"), names) else one.orelse
    return [*one.orelse, *one.body]


def _constant(value: ast.expr | None) -> bool:
    calls = [one for one in ast.walk(value) if isinstance(one, ast.Call)] if value is not None else []
    return all(_root(call.func) in _HARMLESS for call in calls)


def _root(called: ast.expr) -> str:
    while isinstance(called, ast.Attribute):
        called = called.value
    return called.id if isinstance(called, ast.Name) else ""


def _asks_for_main(test: ast.expr) -> bool:
    return any(isinstance(one, ast.Name) and one.id == "__name__" for one in ast.walk(test))
