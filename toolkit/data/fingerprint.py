"""A fingerprint of rows, by which a checkpoint knows its own: of what is read of them, in their order."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

_MARKS = 64
"""Places at which a fingerprint is kept, so that a change is found to within a small part of the rows."""
_SIZE = 16


class Fingerprint:
    """Of rows, one after another. ``order``: of the rows in their order; ``content``: of the rows in any order."""

    def __init__(self) -> None:
        self.rows, self._order, self._content = 0, b"", 0
        self._marks: list[tuple[int, str]] = []
        self._stride = 1

    def add(self, value: Mapping[str, Any], read: Iterable[str]) -> None:
        """Count in one more row. ``read``: the names of the columns that are read of it."""
        kept = {name: value[name] for name in sorted(read) if value.get(name) is not None}
        row = _hash(json.dumps(kept, sort_keys=True, default=_other).encode("utf-8", "surrogatepass"))
        self.rows += 1
        self._order = _hash(self._order + row)
        self._content = (self._content + int.from_bytes(row)) % 2 ** (8 * _SIZE)
        if self.rows % self._stride == 0:
            self._marks.append((self.rows, self._order.hex()))
            if len(self._marks) > _MARKS:
                self._stride *= 2
                self._marks = [one for one in self._marks if one[0] % self._stride == 0]

    def at(self) -> str:
        """Of the rows so far, in their order."""
        return self._order.hex()

    def to_json(self) -> dict[str, Any]:
        """``rows``, ``order``, ``content`` and ``marks``: [rows, order of the rows up to there]."""
        return {"rows": self.rows, "order": self.at(), "content": f"{self._content:x}", "marks": self._marks}


def change(old: Mapping[str, Any], new: Mapping[str, Any], orders: Mapping[int, str]) -> str | None:
    """What is other in the rows of ``new``, in words; None: nothing. ``orders``: of the new rows, the order of the
    first so many, for every number that ``old`` has a mark at, and for the number of its rows."""
    before, after = old["rows"], new["rows"]
    if old["order"] == new["order"]:
        return None
    if after > before and orders.get(before) == old["order"]:
        added = "1 row was" if after - before == 1 else f"{after - before:,} rows were"
        return f"{added} added behind the {before:,} rows of before"
    if after == before and old["content"] == new["content"]:
        return f"the same {after:,} rows are in another order"
    marks = [(int(at), order) for at, order in old["marks"]]
    same = [at for at, order in marks if orders.get(at) == order]
    first = max(same, default=0) + 1
    other = [at for at, _ in marks if at >= first and at <= min(before, after)]
    if after < before and not other and first > after:
        removed = "row was" if before - after == 1 else f"{before - after:,} rows were"
        return f"the last {removed} removed, of {before:,}"
    many = f"{after:,} rows" if after == before else f"{after:,} rows instead of {before:,}"
    last = min(other, default=max(before, after))
    return f"{many}; the first that is other is row {first:,}" + (f" to {last:,}" if last > first else "")


def _hash(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_SIZE).digest()


def _other(value: Any) -> str:
    """What JSON has no form for: images and recordings by their bytes, dates as they are written."""
    if isinstance(value, bytes | bytearray):
        return _hash(bytes(value)).hex()
    # A decoded image has no bytes that would be the same in another process.
    return str(value) if type(value).__module__ in ("datetime", "decimal", "uuid") else type(value).__name__
