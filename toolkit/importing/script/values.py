"""The value of an expression, as far as a script's text decides it."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module
_OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Eq: operator.eq, ast.NotEq: operator.ne,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Is: operator.is_, ast.IsNot: operator.is_not,
}  # fmt: skip
"""No powers: a script that is read must not take long."""
_FUNCTIONS: dict[str, Callable[..., Any]] = {"int": int, "float": float, "str": str, "bool": bool, "min": min,
                                             "max": max, "list": list, "tuple": tuple}  # fmt: skip
_MOST_ELEMENTS = 10_000
_DEPTH = 40


class Unreadable(Exception):
    """The text does not decide the value; the message says why."""


@dataclass(frozen=True)
class Default:
    """What a name has unless the command line of the script says otherwise."""

    value: ast.expr
    line: int
    of: str
    """In words, «--batch-size»."""


@dataclass
class Names:
    """What a script's names are assigned to, by scope, and the defaults of its command line by name."""

    assigned: dict[Scope, dict[str, list[ast.expr | None]]] = field(default_factory=dict)
    """None: something that is no expression, such as a loop's variable."""
    scopes: dict[ast.AST, Scope] = field(default_factory=dict)
    defaults: dict[str, list[Default]] = field(default_factory=dict)

    def scope_of(self, node: ast.AST) -> Scope:
        """The innermost function around ``node``, or the module."""
        return self.scopes[node]

    def outer(self, scope: Scope) -> Scope | None:
        return None if isinstance(scope, ast.Module) else self.scopes[scope]


@dataclass
class Reader:
    """Evaluates expressions; ``taken`` lists the defaults that the values depend on, in words."""

    names: Names
    taken: list[str] = field(default_factory=list)
    _depth: int = 0

    def value(self, node: ast.expr) -> Any:
        """The value of ``node``: numbers, texts, lists and dictionaries; a dtype of torch is its name. Raises
        Unreadable."""
        with self._deeper():
            try:
                return self._value(node)
            except (ArithmeticError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
                raise Unreadable(f"{_text(node)} cannot be computed ({type(error).__name__})") from None

    def call(self, node: ast.expr) -> ast.Call | None:
        """The call that ``node`` is, or that its name is assigned to; None where ``node`` is the value None. Raises
        Unreadable."""
        with self._deeper():
            return self._call(node)

    @contextmanager
    def _deeper(self) -> Iterator[None]:
        if self._depth > _DEPTH:
            raise Unreadable("refers to itself")
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _call(self, node: ast.expr) -> ast.Call | None:
        if isinstance(node, ast.Call):
            return node
        if isinstance(node, ast.Constant) and node.value is None:
            return None
        if isinstance(node, ast.IfExp):
            return self.call(node.body if self.value(node.test) else node.orelse)
        values = self._assigned(node) if isinstance(node, ast.Name) else []
        if len(values) == 1 and values[0] is not None:
            return self.call(values[0])
        raise Unreadable(f"{_text(node)} is known only when the script runs")

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.List() | ast.Tuple() | ast.Set():
                return [self.value(item) for item in node.elts]
            case ast.Dict():
                return self._dictionary(node)
            case ast.Name():
                return self._name(node)
            case ast.Attribute():
                return self._attribute(node)
            case ast.Subscript():
                return self.value(node.value)[self.value(node.slice)]
            case ast.UnaryOp():
                return self._signed(node)
            case ast.BinOp():
                return self._computed(node.op, node.left, node.right)
            case ast.Compare(ops=[ast.In()]):
                return self.value(node.left) in self.value(node.comparators[0])
            case ast.Compare(ops=[only]):
                return self._computed(only, node.left, node.comparators[0])
            case ast.BoolOp():
                return self._first(node)
            case ast.IfExp():
                return self.value(node.body if self.value(node.test) else node.orelse)
            case ast.JoinedStr():
                return "".join(str(self.value(part)) for part in node.values)
            case ast.FormattedValue():
                return self.value(node.value)
            case ast.Call():
                return self._called(node)
            case _:
                raise Unreadable(f"{_text(node)} is known only when the script runs")

    def _dictionary(self, node: ast.Dict) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                made |= self.value(value)
            else:
                made[self.value(key)] = _or_unreadable(self, value)
        return made

    def _name(self, node: ast.Name) -> Any:
        values = self._assigned(node)
        if not values:
            raise Unreadable(f"{node.id} is not set in the script")
        read = [self._assigned_value(node.id, value) for value in values]
        if any(value != read[0] for value in read[1:]):
            raise Unreadable(f"{node.id} is set to {' and '.join(map(repr, read))}")
        return read[0]

    def _assigned_value(self, name: str, value: ast.expr | None) -> Any:
        if value is None:
            raise Unreadable(f"{name} is known only when the script runs")
        return self.value(value)

    def _assigned(self, node: ast.Name) -> Sequence[ast.expr | None]:
        scope: Scope | None = self.names.scope_of(node)
        while scope is not None:
            if node.id in self.names.assigned.get(scope, {}):
                return self.names.assigned[scope][node.id]
            scope = self.names.outer(scope)
        return []

    def _attribute(self, node: ast.Attribute) -> Any:
        if isinstance(node.value, ast.Name) and node.value.id == "torch":
            return node.attr
        if defaults := self.names.defaults.get(node.attr):
            values = [self.value(default.value) for default in defaults]
            if any(value != values[0] for value in values[1:]):
                raise Unreadable(f"{_text(node)} has several defaults")
            self.taken.append(defaults[0].of)
            return values[0]
        raise Unreadable(f"{_text(node)} is known only when the script runs")

    def _signed(self, node: ast.UnaryOp) -> Any:
        value = self.value(node.operand)
        return not value if isinstance(node.op, ast.Not) else -value if isinstance(node.op, ast.USub) else value

    def _computed(self, operation: ast.AST, left: ast.expr, right: ast.expr) -> Any:
        compute = _OPERATORS.get(type(operation))
        if compute is None:
            raise Unreadable(f"{_text(left)} {type(operation).__name__} {_text(right)} is not computed")
        first, second = self.value(left), self.value(right)
        repeats = isinstance(operation, ast.Mult) and any(isinstance(v, str | list) for v in (first, second))
        if repeats or (isinstance(first, str) and isinstance(operation, ast.Mod)):
            raise Unreadable(f"{_text(left)} is not a number")
        return compute(first, second)

    def _first(self, node: ast.BoolOp) -> Any:
        value: Any = None
        for operand in node.values:
            value = self.value(operand)
            if bool(value) == isinstance(node.op, ast.Or):
                return value
        return value

    def _called(self, node: ast.Call) -> Any:
        name = dotted(node.func)
        if name in ("os.environ.get", "os.getenv", "environ.get", "getenv") and len(node.args) == 2:
            self.taken.append(f"the environment's {_text(node.args[0])}")
            return self.value(node.args[1])
        if name == "getattr" and len(node.args) == 2 and dotted(node.args[0]) == "torch":
            return self.value(node.args[1])
        if name == "dict" and not node.args:
            return {word.arg: _or_unreadable(self, word.value) for word in node.keywords if word.arg is not None}
        if name in _FUNCTIONS and not node.keywords:
            return _FUNCTIONS[name](*(self.value(argument) for argument in node.args))
        raise Unreadable(f"{_text(node)} is known only when the script runs")


@dataclass(frozen=True)
class Hidden:
    """A value of a dictionary that the text does not decide: only who needs it is told."""

    reason: str


def _or_unreadable(reader: Reader, node: ast.expr) -> Any:
    try:
        return reader.value(node)
    except Unreadable as error:
        return Hidden(str(error))


def dotted(node: ast.expr) -> str:
    """``torch.optim.AdamW`` of a name or an attribute; of anything else the part behind the last call."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else node.attr
    return ""


def _text(node: ast.AST) -> str:
    """The expression as it is written, short."""
    text = ast.unparse(node)
    return text if len(text) <= 60 else f"{text[:57]}..."


def plain(value: Any) -> bool:
    """Whether no part of ``value`` is hidden, and it is of a size that settings have."""
    if isinstance(value, Mapping):
        return len(value) < _MOST_ELEMENTS and all(plain(item) for item in value.values())
    if isinstance(value, list):
        return len(value) < _MOST_ELEMENTS and all(plain(item) for item in value)
    return not isinstance(value, Hidden)
