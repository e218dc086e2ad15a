"""Where a turn is in a rendered conversation: pure arithmetic on strings."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

_GAPS = re.compile(r"\s+")


class Marks:
    """The special and added tokens of a tokenizer, as text."""

    def __init__(self, tokenizer: Any) -> None:
        added = {str(token) for token in getattr(tokenizer, "added_tokens_decoder", {}).values()}
        words = sorted({*map(str, tokenizer.all_special_tokens), *added}, key=len, reverse=True)
        words = [word for word in words if word.strip()]
        self._pattern = re.compile("|".join(map(re.escape, words))) if words else re.compile(r"(?!)")
        self._longest = max(map(len, words), default=0)
        self._at_end = re.compile(rf"(?:\s|{self._pattern.pattern})*\Z")

    def before(self, text: str, at: int) -> int:
        """``at``, or the start of the token that ``at`` cuts through."""
        for match in self._pattern.finditer(text, max(0, at - self._longest)):
            if match.start() >= at:
                break
            if match.end() > at:
                return match.start()
        return at

    def words_end(self, text: str) -> int:
        """Where the last word ends: behind it are tokens of this kind and white space alone."""
        # From the back: a pattern anchored at the end would be tried from every position.
        at = len(text)
        while at:
            stripped = len(text[:at].rstrip())
            tail = text[max(0, stripped - self._longest) : stripped]
            last = None
            for match in self._pattern.finditer(tail):
                last = match
            if last is None or last.end() != len(tail):
                return stripped
            at = stripped - (last.end() - last.start())
        return 0

    def first(self, text: str) -> str | None:
        """The first such token; None where there is none."""
        found = self._pattern.search(text)
        return found.group() if found else None

    def turn_end(self, text: str, closing: str | None) -> int:
        """Where ``text`` ends without what follows the token that ends the turn: the last ``closing`` behind its words,
        or where that is not there (a call has an end of its own) the last of all such tokens."""
        words = self.words_end(text)
        at = text.rfind(closing, words) if closing else -1
        if closing and at >= 0:
            return at + len(closing)
        return len(text.rstrip()) if self.has(text[words:]) else len(text)

    def has(self, text: str) -> bool:
        return self._pattern.search(text) is not None

    def only(self, text: str) -> bool:
        """Whether ``text`` is nothing but such tokens and white space."""
        return not self._pattern.sub("", text).strip()


def common(left: str, right: str, marks: Marks) -> int:
    """The length of what both begin with, cutting through no token."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left.startswith(right[:middle]):
            low = middle
        else:
            high = middle - 1
    return min(marks.before(left, low), marks.before(right, low))


def agreed(base: str, prompt: str, turn: str, marks: Marks, *, closes: bool, open_ended: bool) -> int | None:
    """Where a turn ends in ``base``, if ``base`` shows it as it is generated; else None.

    ``turn`` is ``prompt`` and what is generated from it. Of that, ``base`` may lack no word, and not the first token
    that ends the turn; what a template adds at the very end of a conversation (Phi-3's end-of-text) it may lack.
    ``closes``: the template writes something that ends a turn. ``open_ended``: a turn without one counts as well where
    more follows (GLM-4: the next header ends it).
    """
    if not base.startswith(prompt) or not turn.startswith(prompt):
        return None
    if base.startswith(turn):
        return len(turn) if closes or open_ended or len(turn) == len(base) else None
    end, words = common(base, turn, marks), marks.words_end(turn)
    if end < max(words, len(prompt)) or not marks.only(turn[end:]):
        return None
    if closes and marks.has(turn[words:]):
        return end if marks.has(turn[words:end]) else None
    return end if open_ended or end == len(base) else None


def first_lost(text: str, places: Sequence[str]) -> bool:
    """Whether no place has ``text``; white space and JSON's way to write a string make no difference."""
    if not text.strip() or any(text in place for place in places):
        return False
    bare = [_GAPS.sub("", place) for place in places]
    forms = {text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]}
    return not any(_GAPS.sub("", form) in place for form in forms for place in bare)
