"""Write files, flush them to disk, and hash them."""

from __future__ import annotations

import os
from pathlib import Path

from toolkit.errors import InputError


def write_text(target: str | Path, text: str) -> None:
    """Write a file that the user named, and make its folder; raises InputError if that cannot be."""
    try:
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{target}: {error.strerror}") from None


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    import hashlib

    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush_to_disk(path: Path) -> None:
    """Flush a file's bytes, or a folder's entries, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
