"""JSON as Python's json accepts it (NaN and Infinity too), with positions."""

from __future__ import annotations

import json
import re
from typing import Any

from toolkit.errors import InputError
from toolkit.linting.files.tree import MAX_DEPTH, MAX_VALUES, Entry, Node, Source

_SPACE = re.compile(r"[ \t\n\r]*")
_NUMBER = re.compile(r"(-?(?:0|[1-9][0-9]*))(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_STRING = re.compile(r'"((?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*)"')
_WORDS = {
    "true": True,
    "false": False,
    "null": None,
    "NaN": float("nan"),
    "Infinity": float("inf"),
    "-Infinity": float("-inf"),
}
_WORD = re.compile(r"true|false|null|NaN|Infinity|-Infinity")


def parse_json(text: str, file: str) -> Node:
    """The tree of a JSON document; raises InputError with line and column where it is not one."""
    return _Reader(text, file).document()


class _Reader:
    def __init__(self, text: str, file: str) -> None:
        self.text, self.file = text, file
        self.at = 1 if text.startswith("\ufeff") else 0  # a rule of its own speaks of the byte-order mark
        self.count = 0

    def document(self) -> Node:
        node = self._value(0)
        self._skip()
        if self.at < len(self.text):
            self._fail("expected the end of the file")
        return node

    def _value(self, depth: int) -> Node:
        self._skip()
        self.count += 1
        if self.count > MAX_VALUES:
            self._fail(f"more than {MAX_VALUES} values: not a configuration")
        start, character = self.at, self.text[self.at : self.at + 1]
        if character in ("{", "["):
            if depth >= MAX_DEPTH:
                self._fail(f"nested more than {MAX_DEPTH} deep")
            return self._object(depth) if character == "{" else self._array(depth)
        if character == '"':
            value = self._string()
            return Node(start, self.at, value)
        word = _WORD.match(self.text, start)
        if word:
            self.at = word.end()
            name = word.group()
            return Node(start, self.at, _WORDS[name])
        number = _NUMBER.match(self.text, start)
        if number:
            self.at = number.end()
            return Node(start, self.at, self._number(number))
        return self._fail("expected a value")

    def _number(self, match: re.Match[str]) -> Any:
        whole, fraction, exponent = match.groups()
        if fraction or exponent:
            return float(match.group())
        try:
            return int(whole)
        except ValueError:  # Python's limit on the digits of an int; json has it too
            return self._fail("a number with too many digits")

    def _string(self) -> str:
        match = _STRING.match(self.text, self.at)
        if not match:
            return self._fail("a string is not closed, or contains a line break or an unknown escape")
        self.at = match.end()
        text = match.group(1)
        if "\\" not in text:
            return text
        # Half a surrogate pair cannot be printed: it becomes the replacement character.
        return json.loads(match.group()).encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def _object(self, depth: int) -> Node:
        node = Node(self.at, self.at, entries={})
        assert node.entries is not None
        self.at += 1
        while True:
            self._skip()
            if not node.entries and self._take("}"):
                break
            key_start = self.at
            if self.text[self.at : self.at + 1] != '"':
                self._fail("expected a key in double quotes", after_comma=bool(node.entries))
            key = self._string()
            key_end = self.at
            self._skip()
            if not self._take(":"):
                self._fail(f'expected ":" after "{key}"')
            value = self._value(depth + 1)
            if key in node.entries:
                node.repeats.append(node.entries[key])
            node.entries[key] = Entry(key, key_start, key_end, value)
            self._skip()
            if self._take("}"):
                break
            if not self._take(","):
                self._fail('expected "," or "}"')
        node.end = self.at
        return node

    def _array(self, depth: int) -> Node:
        node = Node(self.at, self.at, items=[])
        assert node.items is not None
        self.at += 1
        while True:
            self._skip()
            if not node.items and self._take("]"):
                break
            node.items.append(self._value(depth + 1))
            self._skip()
            if self._take("]"):
                break
            if not self._take(","):
                self._fail('expected "," or "]"')
        node.end = self.at
        return node

    def _skip(self) -> None:
        match = _SPACE.match(self.text, self.at)
        assert match is not None
        self.at = match.end()

    def _take(self, character: str) -> bool:
        found = self.text[self.at : self.at + 1] == character
        self.at += found
        return found

    def _fail(self, message: str, after_comma: bool = False) -> Any:
        here = self.text[self.at : self.at + 2]
        if here in ("//", "/*") or here[:1] == "#":
            message += "; JSON has no comments: DeepSpeed accepts them, accelerate and transformers do not"
        elif after_comma and here[:1] == "}":
            message += "; JSON allows no comma before a closing brace"
        elif self.at >= len(self.text):
            message += ", but the file ends"
        place = Source(self.file, "", self.text, Node(0, 0)).place(min(self.at, len(self.text)))
        raise InputError.at(place, None, f"not valid JSON: {message}")
