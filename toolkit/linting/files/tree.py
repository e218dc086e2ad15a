"""A parsed file: values, and the position of each key and value in the text."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from toolkit.errors import Place

Path = tuple[str, ...]

MAX_VALUES = 20_000  # more values than any configuration has: an alias bomb, or not a configuration
MAX_DEPTH = 64


@dataclass(slots=True, eq=False)
class Node:
    """A value and its span in the text; a mapping has entries, a list items, a scalar neither."""

    start: int
    end: int
    value: Any = None
    entries: dict[str, Entry] | None = None
    items: list[Node] | None = None
    flow: bool = True  # written with braces or brackets (JSON always is)
    repeats: list[Entry] = field(default_factory=list)  # keys written twice: the earlier ones, which are lost

    def plain(self) -> Any:
        """The value as plain Python objects."""
        if self.entries is not None:
            return {key: entry.node.plain() for key, entry in self.entries.items()}
        return [item.plain() for item in self.items] if self.items is not None else self.value


@dataclass(slots=True, eq=False)
class Entry:
    """A key of a mapping: its span (quotes included) and its value."""

    key: str
    start: int
    end: int
    node: Node
    merged: bool = False  # came through YAML's `<<`: it is elsewhere and cannot be edited here


@dataclass(eq=False)
class Source:
    """One file (or one part of a command line) of one kind.

    ``kind`` is ``accelerate``, ``deepspeed``, ``args`` (of the Trainer or of TRL), ``peft``, ``launch`` (flags of a
    launcher) or ``tool`` (a file or the arguments of another program).
    """

    path: str
    kind: str
    text: str
    root: Node
    syntax: str = "yaml"  # "yaml", "json" or "shell"
    named_by: Place | None = None  # the place in another file that names this one
    launcher: str | None = None  # of kind "launch": "accelerate", "deepspeed", "torchrun" or a tool
    tool: str = ""  # of kinds "args" and "tool": the program that reads it (`tools.py`); "": not known
    certain: bool = True  # False: it may be another program's file, so nothing in it is fixed
    command: int = 0  # of a shell script: the number of the command
    unknown: dict[str, Entry] = field(default_factory=dict)  # keys of a command with a shell variable as their value
    open: bool = False  # a variable of the command may hold further keys
    names: list[str] = field(default_factory=list)  # the files that it refers to

    @cached_property
    def _line_starts(self) -> list[int]:
        starts, position = [0], self.text.find("\n")
        while position >= 0:
            starts.append(position + 1)
            position = self.text.find("\n", position + 1)
        return starts

    def place(self, offset: int) -> Place:
        """Line and column of an offset, counted from 1."""
        line = bisect.bisect_right(self._line_starts, offset)
        return Place(self.path, line, offset - self._line_starts[line - 1] + 1)

    def line_text(self, line: int) -> str:
        """The text of a line, without its end."""
        start = self._line_starts[line - 1]
        end = self._line_starts[line] if line < len(self._line_starts) else len(self.text)
        return self.text[start:end].rstrip("\r\n")

    def entry(self, key: str) -> Entry | None:
        """The entry at a dotted path, or None."""
        found: Entry | None = None
        node = self.root
        for part in key.split("."):
            found = node.entries.get(part) if node.entries is not None else None
            if found is None:
                return None
            node = found.node
        return found

    def get(self, key: str, default: Any = None) -> Any:
        """The plain value at a dotted path, or ``default``."""
        entry = self.entry(key)
        return default if entry is None else entry.node.plain()

    def has(self, key: str) -> bool:
        """Whether a dotted path is written in the file."""
        return self.entry(key) is not None

    def unsure(self, key: str) -> bool:
        """Whether a shell variable decides about a key: it holds the value, or may hold the key."""
        return not self.has(key) and (self.open or key in self.unknown)

    def section(self, key: str) -> dict[str, Entry]:
        """The entries of the mapping at a dotted path (``""``: the whole file); empty if it is not."""
        if not key:
            return self.root.entries or {}
        entry = self.entry(key)
        return (entry.node.entries or {}) if entry is not None else {}

    def walk(self) -> Iterator[tuple[str, Entry]]:
        """Every entry with its dotted path, outermost first."""
        stack: list[tuple[str, Node]] = [("", self.root)]
        while stack:
            prefix, node = stack.pop()
            for key, entry in (node.entries or {}).items():
                path = f"{prefix}.{key}" if prefix else key
                yield path, entry
                stack.append((path, entry.node))
            stack.extend((prefix, item) for item in node.items or ())

    def mappings(self) -> Iterator[tuple[str, Node]]:
        """Every mapping with its dotted path, the file itself first."""
        yield "", self.root
        for path, entry in self.walk():
            if entry.node.entries is not None:
                yield path, entry.node
