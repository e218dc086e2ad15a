"""A sample as text, token by token."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.tasks.labels import IGNORED

_INVISIBLE = ("Cc", "Cf", "Cs", "Zl", "Zp")


@dataclass(frozen=True)
class Piece:
    """The text of one token; of several, where one token alone has only a part of a character."""

    text: str
    ids: tuple[int, ...]
    supervised: bool
    """The model learns to write it."""
    special: bool

    def as_json(self) -> dict[str, Any]:
        return {"text": self.text, "ids": list(self.ids), "supervised": self.supervised, "special": self.special}


class Decoder:
    """Decodes token by token with a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._special = {
            *getattr(tokenizer, "all_special_ids", ()),
            *(number for number, one in added.items() if one.special),
        }

    def pieces(self, ids: Sequence[int], labels: Sequence[int], *, shifted: bool) -> list[Piece]:
        """``labels``: as many as ids, IGNORED where there is no loss. ``shifted``: the first token is never predicted,
        as in a causal model."""
        found: list[Piece] = []
        known = start = 0  # the text of ids[known:start] is the context of what comes next
        for end in range(1, len(ids) + 1):
            alone = ids[end - 1] in self._special
            if alone and start < end - 1:  # an unfinished character before it
                found.append(self._piece(ids, labels, start, end - 1, self._text(ids[start : end - 1]), shifted))
                known = start = end - 1
            text = self._text(ids[start:end]) if alone else self._next(ids, known, start, end)
            if text.endswith("\ufffd") and end < len(ids) and end - start < 4:
                continue
            found.append(self._piece(ids, labels, start, end, text, shifted))
            known, start = (end if alone else start), end
        return found

    def _next(self, ids: Sequence[int], known: int, start: int, end: int) -> str:
        before, both = self._text(ids[known:start]), self._text(ids[known:end])
        return both[len(before) :] if both.startswith(before) else self._text(ids[start:end])

    def _piece(
        self, ids: Sequence[int], labels: Sequence[int], start: int, end: int, text: str, shifted: bool
    ) -> Piece:
        learned = any(labels[at] != IGNORED and not (shifted and at == 0) for at in range(start, end))
        return Piece(text, tuple(ids[start:end]), learned, ids[start] in self._special)

    def _text(self, ids: Sequence[int]) -> str:
        if not ids:
            return ""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def spans(pieces: Sequence[Piece]) -> list[list[int]]:
    """Ranges of characters of the joined text that are supervised: [start, end], neighbours joined."""
    found: list[list[int]] = []
    at = 0
    for piece in pieces:
        end = at + len(piece.text)
        if piece.supervised:
            if found and found[-1][1] == at:
                found[-1][1] = end
            else:
                found.append([at, end])
        at = end
    return found


def visible(text: str) -> str:
    """``text`` with its invisible characters written as escapes, so that data cannot control a terminal or reorder a
    line. Line ends and tabs stay."""
    if text.isprintable():
        return text
    return "".join(
        char if char in "\n\t" or unicodedata.category(char) not in _INVISIBLE else _escaped(char) for char in text
    )


def _escaped(char: str) -> str:
    number = ord(char)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
