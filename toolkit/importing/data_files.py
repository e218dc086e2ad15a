"""The recipe's data, from names of files and data sets: what a local file's first row shows, and how it is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toolkit.data.files import local_files
from toolkit.data.rows import read_rows
from toolkit.errors import InputError

_LOADERS = ("json", "parquet", "text")  # `load_dataset("json", data_files=...)`


def first_row(spec: str) -> dict[str, Any] | None:
    """The first row of a local file or folder; None for a hub id, or where nothing can be read."""
    try:
        files = local_files(spec, "data.train")
        if not files:
            return None
        return next((row.value for row in read_rows(files[:1])), None)
    except InputError:
        return None


def source(
    path: str, *, files: Any = None, name: str | None = None, split: str | None = None, revision: str | None = None
) -> str | dict[str, Any] | None:
    """``data.train`` for what ``load_dataset(path, name, data_files=files, split=split)`` loads; None if it has none.

    A text for one file or a hub data set's training split, else a mapping for an entry of the list of sources.
    """
    if path in _LOADERS or files is not None:
        one = files[0] if isinstance(files, list) and len(files) == 1 else files
        return str(one) if isinstance(one, str) and path in (*_LOADERS, "", "csv") else None
    if Path(path).expanduser().exists():
        return _local(path, split)
    if split in (None, "train") and name is None and revision is None:
        return path
    found = {"path": path, "name": name, "split": split, "revision": revision}
    return {key: value for key, value in found.items() if value is not None}


def _local(path: str, split: str | None) -> str | None:
    try:
        files = local_files(path, "data.train") or []
    except InputError:
        return None
    if len(files) == 1:
        return str(files[0])
    # datasets sorts the files of a folder into splits by their names.
    chosen = [file for file in files if file.name.startswith(split or "train")]
    return str(chosen[0]) if len(chosen) == 1 else None


def columns_format(row: dict[str, Any] | None) -> str | None:
    """How TRL reads a row: ``messages``, ``conversational-prompt``, ``prompt-completion``, ``text`` or None."""
    if row is None:
        return None
    if isinstance(row.get("messages"), list) or isinstance(row.get("conversations"), list):
        return "messages"
    if "prompt" in row and "completion" in row:
        return "conversational-prompt" if isinstance(row["prompt"], list) else "prompt-completion"
    return "text" if any(isinstance(value, str) for value in row.values()) else None


def longest_text(spec: str, field: str, most: int = 1_000_000) -> int | None:
    """An upper bound of the tokens of the longest text of a local file: its bytes, and two special tokens.

    A token stands for at least one byte. None where the texts cannot all be read.
    """
    try:
        files = local_files(spec, "data.train")
        if not files or sum(file.stat().st_size for file in files) > 64 * most:
            return None
        return 3 + max(len(str(row.value[field]).encode()) for row in read_rows(files))
    except (InputError, KeyError, ValueError, OSError):
        return None


def row_count(spec: str) -> int | None:
    """The rows of a local file or folder; None where they cannot be counted."""
    try:
        files = local_files(spec, "data.train")
        return sum(1 for _ in read_rows(files)) if files else None
    except InputError:
        return None
