"""A script's calls, with the arguments that can be read, and the names that they refer to."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from toolkit.errors import InputError, Place
from toolkit.importing.script.values import Default, Hidden, Names, Reader, Scope, Unreadable, dotted, plain
from toolkit.linting.files.text import read_text

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Argument:
    """An argument of a call. ``unread``: why its value is not known, "" where it is. ``defaults``: of the script's own
    command line that the value depends on, in words."""

    value: Any
    line: int
    unread: str = ""
    defaults: tuple[str, ...] = ()


@dataclass
class Call:
    """A call. ``name``: with dots, as it is written. ``open``: why there may be further arguments, "" if there are
    none."""

    name: str
    node: ast.Call
    line: int
    open: str = ""
    arguments: dict[str, Argument] = field(default_factory=dict)

    @property
    def last(self) -> str:
        """The part of the name behind the last dot."""
        return self.name.rpartition(".")[2]

    @property
    def owner(self) -> str:
        """The name of what the method is called on, without what is before it."""
        return self.name.rpartition(".")[0].rpartition(".")[2]


class Script:
    """A parsed script. Raises InputError where the file is none."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self.tree = ast.parse(read_text(path), path)
        except SyntaxError as error:
            raise InputError.at(Place(path, error.lineno), None, f"not Python: {error.msg}") from None
        except (RecursionError, MemoryError, ValueError):
            raise InputError.at(Place(path), None, "not a script that can be parsed") from None
        self.names = Names()
        self._scan(self.tree, self.tree)
        self.calls = [self._call(node) for node in _in_order(self.tree) if isinstance(node, ast.Call)]

    def place(self, line: int | None) -> Place:
        """A line of the script."""
        return Place(self.path, line)

    def called(self, *names: str) -> list[Call]:
        """Calls whose name ends in one of ``names``, in the order of the text."""
        return [call for call in self.calls if call.last in names]

    def resolved(self, node: ast.expr) -> Call | None:
        """The call that ``node`` refers to; None where it is the value None. Raises Unreadable."""
        call = Reader(self.names).call(node)
        return None if call is None else next(known for known in self.calls if known.node is call)

    def argument(self, node: ast.expr) -> Argument:
        """What ``node`` is."""
        reader = Reader(self.names)
        try:
            value = reader.value(node)
        except Unreadable as error:
            return Argument(None, node.lineno, str(error))
        if not plain(value) and not isinstance(value, dict):
            return Argument(None, node.lineno, "holds what is known only when the script runs")
        return Argument(value, node.lineno, "", tuple(dict.fromkeys(reader.taken)))

    def _call(self, node: ast.Call) -> Call:
        call = Call(dotted(node.func), node, node.lineno)
        for word in node.keywords:
            if word.arg is not None:
                call.arguments[word.arg] = self.argument(word.value)
                continue
            given = self.argument(word.value)
            if given.unread or not isinstance(given.value, dict):
                call.open = given.unread or "its arguments are known only when the script runs"
                continue
            for name, value in given.value.items():
                hidden = value.reason if isinstance(value, Hidden) else ""
                call.arguments[str(name)] = Argument(None if hidden else value, given.line, hidden, given.defaults)
        return call

    def _scan(self, node: ast.AST, scope: Scope) -> None:
        """Note the scope of every node, what names are assigned to, and the defaults of the command line."""
        self.names.scopes[node] = scope
        inner: Scope = node if isinstance(node, _FUNCTIONS) else scope
        if isinstance(node, _FUNCTIONS):
            self._parameters(node)
        if isinstance(node, ast.ClassDef):
            self._fields(node)
        for target, value in _assignments(node):
            self._assign(inner, target, value)
        if isinstance(node, ast.Call):
            self._option(node)
        for child in ast.iter_child_nodes(node):
            self._scan(child, inner)

    def _assign(self, scope: Scope, target: ast.expr, value: ast.expr | None) -> None:
        if isinstance(target, ast.Name):
            self.names.assigned.setdefault(scope, {}).setdefault(target.id, []).append(value)
        elif isinstance(target, ast.Tuple | ast.List):
            values = value.elts if isinstance(value, ast.Tuple | ast.List) else []
            paired = values if len(values) == len(target.elts) else [None] * len(target.elts)
            for part, item in zip(target.elts, paired, strict=True):
                self._assign(scope, part, item)

    def _parameters(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        given = [*node.args.posonlyargs, *node.args.args]
        defaults = [None] * (len(given) - len(node.args.defaults)) + list(node.args.defaults)
        pairs = [*zip(given, defaults, strict=True), *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]
        for parameter, default in pairs:
            self._assign(node, ast.Name(parameter.arg), default)

    def _fields(self, node: ast.ClassDef) -> None:
        """Defaults of a class's fields: dataclasses of a command line."""
        for statement in node.body:
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            value = statement.value
            if isinstance(value, ast.Call):
                value = next((word.value for word in value.keywords if word.arg == "default"), None)
            self._default(statement.target.id, value, f"{node.name}.{statement.target.id}")

    def _option(self, node: ast.Call) -> None:
        """The default of an ``add_argument``, or of a click or typer option."""
        if dotted(node.func).rpartition(".")[2] not in ("add_argument", "option"):
            return
        flags = [word.value for word in node.args if isinstance(word, ast.Constant) and isinstance(word.value, str)]
        named = {word.arg: word.value for word in node.keywords}
        long = next((flag for flag in flags if flag.startswith("--")), flags[0] if flags else "")
        name = named.get("dest")
        key = name.value if isinstance(name, ast.Constant) else long.lstrip("-").replace("-", "_")
        action = named.get("action")
        switch = isinstance(action, ast.Constant) and action.value in ("store_true", "store_false")
        off: ast.expr | None = ast.Constant(action.value == "store_false") if switch else None  # type: ignore[union-attr]
        value = named.get("default", off)
        if off is not None and value is off:
            self.names.scopes[off] = self.tree
            ast.copy_location(off, node)
        self._default(str(key), value, long or str(key))

    def _default(self, name: str, value: ast.expr | None, of: str) -> None:
        if value is not None and name:
            self.names.defaults.setdefault(name, []).append(Default(value, value.lineno, of))


def _assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Targets with what they are set to; None where that is no expression."""
    match node:
        case ast.Assign():
            yield from ((target, node.value) for target in node.targets)
        case ast.AnnAssign(value=ast.expr()) | ast.NamedExpr():
            yield node.target, node.value
        case ast.AugAssign() | ast.For() | ast.AsyncFor() | ast.comprehension():
            yield node.target, None
        case ast.withitem(optional_vars=ast.expr()):
            yield node.optional_vars, None  # type: ignore[misc]


def _in_order(tree: ast.AST) -> list[ast.AST]:
    nodes = [node for node in ast.walk(tree) if hasattr(node, "lineno")]
    return sorted(nodes, key=lambda node: (node.lineno, node.col_offset))  # type: ignore[attr-defined]


def first_argument(script: Script, call: Call, name: str) -> Argument | None:
    """A call's first argument, which may also be given by its ``name``."""
    return script.argument(call.node.args[0]) if call.node.args else call.arguments.get(name)
