"""Every message that the product raises for a user, read from the sources: nothing is run."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VALUE = "…"  # stands for what a message fills in
_SCHEMA = ROOT / "toolkit/recipe/schema.py"
# Shorter texts are names of keys and the like, not messages.
_SHORTEST = 9


@dataclass(frozen=True)
class Message:
    """One message: its text with ``VALUE`` for each filled-in part, its exit status, and where it is raised."""

    text: str
    status: int
    file: str
    line: int

    @property
    def area(self) -> str:
        """The package that raises it: recipe, data, lint, ..."""
        parts = Path(self.file).parts
        return parts[1] if len(parts) > 2 else "commands"


@functools.cache
def messages() -> tuple[Message, ...]:
    """All of them, in the order of files and lines. Arguments that are not written as text are left out."""
    trees = {file: ast.parse(file.read_text()) for file in sorted((ROOT / "toolkit").rglob("*.py"))}
    classes = _error_classes(list(trees.values()))
    found = set()
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("problem"):
                found |= {_refusal(text, one, file) for text, one in _returned(node)}
            if isinstance(node, ast.Assign) and any(_called(target) == "problem" for target in node.targets):
                found |= {_refusal(text, node, file) for text in [template(node.value)] if text}
            if not isinstance(node, ast.Call):
                continue
            name = _called(node.func)
            # The schema's own checks raise ValueError; the loader turns them into messages with file, line and key.
            from_schema = name == "ValueError" and file == _SCHEMA
            if name not in classes and not from_schema:
                continue
            status = 2 if from_schema or "InputError" in classes[name] else 1
            texts = _of_at(node) if _is_at(node.func) else [template(argument) for argument in node.args]
            for text in texts:
                if text is not None and len(text.replace(VALUE, "").strip()) >= _SHORTEST:
                    found.add(Message(" ".join(text.split()), status, str(file.relative_to(ROOT)), node.lineno))
    return tuple(sorted(found, key=lambda message: (message.file, message.line, message.text)))


def _returned(function: ast.FunctionDef) -> Iterator[tuple[str, ast.stmt]]:
    """What a function returns as text: functions that are called problems say why something is refused."""
    for node in ast.walk(function):
        if isinstance(node, ast.Return) and node.value is not None and (text := template(node.value)):
            yield text, node


def _refusal(text: str, node: ast.stmt, file: Path) -> Message:
    return Message(" ".join(text.split()), 2, str(file.relative_to(ROOT)), node.lineno)


def _error_classes(trees: list[ast.Module]) -> dict[str, set[str]]:
    """ToolkitError and every class made from it: the names of the class and of those that it comes from."""
    bases = {
        node.name: [base.id for base in node.bases if isinstance(base, ast.Name)]
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }

    def line(name: str) -> set[str]:
        return {name}.union(*(line(base) for base in bases.get(name, ())))

    return {name: names for name in bases if "ToolkitError" in (names := line(name))}


def _is_at(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and function.attr == "at"


def _called(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute) and _is_at(function):
        function = function.value
    return function.id if isinstance(function, ast.Name) else ""


def _of_at(call: ast.Call) -> list[str | None]:
    """The text of ``InputError.at(place, key, message)``."""
    _, key, message = call.args
    text = template(message)
    if text is None or (isinstance(key, ast.Constant) and key.value is None):
        return [text]
    return [f"{template(key) or VALUE}: {text}"]


def template(node: ast.expr) -> str | None:
    """The text of a string expression, ``VALUE`` for each part that is not written; None for other expressions."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(template(part) or VALUE for part in parts).replace(VALUE * 2, VALUE)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            sides = template(left), template(right)
            return None if sides == (None, None) else "".join(side or VALUE for side in sides)
        case _:
            return None


def listed(page: str) -> Iterator[str]:
    """The messages that the troubleshooting page has an entry for: its headings in code style."""
    for line in page.splitlines():
        if line.startswith("### `"):
            yield line.removeprefix("### `").rpartition("`")[0]


def raised_as(entry: str, known: Sequence[Message]) -> list[Message]:
    """The messages that hold all the written parts of an entry, in its order."""
    parts = [part.strip() for part in entry.split(VALUE) if part.strip()]
    return [message for message in known if _in_order(parts, message.text)]


def _in_order(parts: list[str], text: str) -> bool:
    at = 0
    for part in parts:
        at = text.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True
