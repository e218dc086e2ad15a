"""``data.eval_fraction``: which rows of ``data.train`` are held out. The content of a row decides, nothing else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from toolkit.data.rows import Row
from toolkit.data.sources import Source
from toolkit.errors import InputError

Columns = Callable[[Mapping[str, Any]], set[str]]
"""The names of the columns that are read of a row."""


def split(source: Source, columns: Columns, fraction: float, held_out: bool) -> Source:
    """The rows of ``source`` that are held out, or the others. Rows that are equal in what is read of them are on one
    side, whatever their place, the seed and the number of processes."""

    def rows() -> Iterator[Row]:
        for row in source.rows():
            if is_held_out(row, columns(row.value), fraction) == held_out:
                yield row

    key = source.key.replace("data.train", "data.eval_fraction", 1) if held_out else source.key
    return replace(source, key=key, rows=rows, part=(fraction, held_out))


def is_held_out(row: Row, columns: set[str], fraction: float) -> bool:
    """Whether the hash of what is read of a row, as a number from 0 to 1, is below ``fraction``; so a larger fraction
    holds out the rows of a smaller one and more. Raises InputError where the content cannot be hashed."""

    def other(value: Any) -> Any:
        if isinstance(value, bytes | bytearray | memoryview):
            return hashlib.blake2b(bytes(value)).hexdigest()
        if callable(getattr(value, "tobytes", None)):  # an image, or an array
            shape = getattr(value, "size", None) if hasattr(value, "mode") else getattr(value, "shape", None)
            return [str(shape), hashlib.blake2b(value.tobytes()).hexdigest()]
        if type(value).__module__ in ("datetime", "decimal", "uuid"):
            return str(value)
        message = f"a {type(value).__name__} cannot be compared by content; hold rows out in a file: data.eval"
        raise row.error("data.eval_fraction", message)

    kept = {name: row.value[name] for name in sorted(columns) if row.value.get(name) is not None}
    content = json.dumps(kept, sort_keys=True, default=other).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest()) < fraction * 2**64


def nothing_left(source: Source) -> InputError:
    """The error for a source whose every row is held out."""
    assert source.part is not None
    return InputError.at(
        None,
        source.key,
        f"every row of {source.spec} is held out by data.eval_fraction: {source.part[0]:g} (rows with the same content "
        "go together); lower it, or set data.eval",
    )


def nothing_held_out(sources: Sequence[Source], fraction: float) -> InputError:
    """The error for a split without a held-out row."""
    named = ", ".join(source.spec for source in sources)
    return InputError.at(
        None,
        "data.eval_fraction",
        f"no row of {named} falls into a share of {fraction:g}; raise it, or set data.eval",
    )
