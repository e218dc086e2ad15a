"""YAML as the packages read it (PyYAML's safe_load, YAML 1.1: `no` is false, `1e-4` is text), with positions.

Built on PyYAML's events, which need no recursion: deep nesting and alias bombs end in a message.
"""

from __future__ import annotations

from typing import Any

import yaml

from toolkit.errors import InputError, Place
from toolkit.linting.files.tree import MAX_DEPTH, MAX_VALUES, Entry, Node

_Loader: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_STANDARD = "tag:yaml.org,2002:"


def parse_yaml(text: str, file: str) -> Node:
    """The tree of a YAML document; raises InputError with the place where it is not one."""
    reader = _Reader(text, file)
    try:
        for event in yaml.parse(text, Loader=_Loader):
            reader.take(event)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Place(file, mark.line + 1, mark.column + 1) if mark else Place(file)
        raise InputError.at(place, None, f"not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise InputError.at(Place(file), None, f"not valid YAML: {str(error).splitlines()[0]}") from None
    return reader.root or Node(0, 0)


class _Open:
    """A mapping or list whose end has not been read yet."""

    def __init__(self, node: Node, anchor: str | None) -> None:
        self.node = node
        self.anchor = anchor
        self.key: tuple[str, int, int] | None = None
        self.merges: list[Node] = []


class _Reader:
    def __init__(self, text: str, file: str) -> None:
        self.text, self.file = text, file
        self.line_starts = _line_starts(text)
        self.root: Node | None = None
        self.stack: list[_Open] = []
        self.anchors: dict[str, Node] = {}
        self.sizes: dict[int, int] = {}  # values below an anchored node, aliases expanded
        self.count = 0
        self.scalars = yaml.SafeLoader("")

    def take(self, event: Any) -> None:
        if isinstance(event, yaml.ScalarEvent):
            self._scalar(event)
        elif isinstance(event, yaml.AliasEvent):
            self._alias(event)
        elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            self._open(event)
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            self._close(event)
        elif isinstance(event, yaml.DocumentStartEvent) and self.root is not None:
            self._fail(event, "a second document starts here; the packages read only one")

    def _open(self, event: Any) -> None:
        mapping = isinstance(event, yaml.MappingStartEvent)
        default = f"{_STANDARD}{'map' if mapping else 'seq'}"
        if event.tag not in (None, "!", default):
            self._fail(event, f"tag {event.tag}: safe_load refuses it")
        if len(self.stack) >= MAX_DEPTH:
            self._fail(event, f"nested more than {MAX_DEPTH} deep")
        start = self._offset(event.start_mark)
        node = Node(start, start + 1, flow=bool(event.flow_style))
        if mapping:
            node.entries = {}
        else:
            node.items = []
        self._count(event, 1)
        self.stack.append(_Open(node, event.anchor))

    def _close(self, event: Any) -> None:
        closed = self.stack.pop()
        node = closed.node
        if node.flow:
            node.end = self._offset(event.end_mark)
        else:  # the mark is behind blank lines and comments: the last value inside is the end
            inside = [entry.node for entry in (node.entries or {}).values() if not entry.merged]
            node.end = max((child.end for child in [*inside, *(node.items or [])]), default=node.start)
        for merged in closed.merges:
            for key, entry in (merged.entries or {}).items():
                if node.entries is not None and key not in node.entries:
                    node.entries[key] = Entry(key, entry.start, entry.end, entry.node, merged=True)
        if closed.anchor:
            self.anchors[closed.anchor] = node
        self._place(node, event)

    def _scalar(self, event: Any) -> None:
        start, end = self._offset(event.start_mark), self._offset(event.end_mark)
        self._count(event, 1)
        top = self.stack[-1] if self.stack else None
        if top is not None and top.node.entries is not None and top.key is None:
            key = event.value if not event.implicit[0] else str(self._construct(event, key=True))
            top.key = (key, start, end)
            return
        node = Node(start, end, self._construct(event))
        if event.anchor:
            self.anchors[event.anchor] = node
        self._place(node, event)

    def _construct(self, event: Any, key: bool = False) -> Any:
        tag = event.tag
        if tag in (None, "!"):
            if not event.implicit[0]:
                return event.value
            tag = self.scalars.resolve(yaml.ScalarNode, event.value, (True, False))
        if not tag.startswith(_STANDARD):
            self._fail(event, f"tag {tag}: safe_load refuses it")
        if key and tag.endswith(("merge", "bool", "null")):
            return event.value
        try:
            return self.scalars.construct_object(yaml.ScalarNode(tag, event.value))
        except (yaml.YAMLError, ValueError, OverflowError, TypeError, AttributeError, KeyError) as error:
            return self._fail(event, f"not a value: {str(error).splitlines()[0]}")

    def _alias(self, event: Any) -> None:
        node = self.anchors.get(event.anchor)
        if node is None:
            self._fail(event, f"*{event.anchor} refers to an anchor that is not complete yet")
            return
        self._count(event, self._size(node))
        top = self.stack[-1] if self.stack else None
        if top is not None and top.node.entries is not None and top.key is None:
            self._fail(event, "a key must be plain text")
        start, end = self._offset(event.start_mark), self._offset(event.end_mark)
        # Own position, shared content: what is inside is where the anchor is.
        here = Node(start, end, node.value, node.entries, node.items, node.flow, node.repeats)
        self.sizes[id(here)] = self._size(node)
        self._place(here, event)

    def _size(self, node: Node) -> int:
        known = self.sizes.get(id(node))
        if known is None:
            children = [entry.node for entry in (node.entries or {}).values()] + (node.items or [])
            known = self.sizes[id(node)] = 1 + sum(self._size(child) for child in children)
        return known

    def _place(self, node: Node, event: Any) -> None:
        if not self.stack:
            self.root = node
            return
        top = self.stack[-1]
        if top.node.items is not None:
            top.node.items.append(node)
            return
        assert top.node.entries is not None
        if top.key is None:
            self._fail(event, "a key must be plain text")
            return
        (key, start, end), top.key = top.key, None
        if key == "<<" and self.text[start : start + 2] == "<<":
            merged = node.items if node.items is not None else [node]
            top.merges.extend(merged)
            return
        if key in top.node.entries:
            top.node.repeats.append(top.node.entries[key])
        top.node.entries[key] = Entry(key, start, end, node)

    def _count(self, event: Any, values: int) -> None:
        self.count += values
        if self.count > MAX_VALUES:
            self._fail(event, f"more than {MAX_VALUES} values (aliases counted): not a configuration")

    def _offset(self, mark: Any) -> int:
        line = min(mark.line, len(self.line_starts) - 1)
        return min(self.line_starts[line] + mark.column, len(self.text))

    def _fail(self, event: Any, message: str) -> None:
        place = Place(self.file, event.start_mark.line + 1, event.start_mark.column + 1)
        raise InputError.at(place, None, message)


def _line_starts(text: str) -> list[int]:
    """Where each line begins, by YAML's own line breaks (CR alone, NEL, LS and PS are some)."""
    starts, index, length = [0], 0, len(text)
    if text.startswith("\ufeff"):
        starts = [1]  # PyYAML counts columns from behind a byte-order mark
    while index < length:
        character = text[index]
        index += 1
        if character == "\r" and text[index : index + 1] == "\n":
            index += 1
            starts.append(index)
        elif character in "\n\r\x85\u2028\u2029":
            starts.append(index)
    return starts
