"""Reads a file as text, or reports why not; never slow, never a traceback."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from toolkit.errors import InputError, Place

MAX_BYTES = 1 << 20  # a configuration file of a megabyte is not one


def read_text(path: str | Path) -> str:
    """The file's text, line ends as they are; raises InputError if it cannot be used."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise InputError.at(Place(path), None, f"{kind}; expected a configuration file")
        if status.st_size > MAX_BYTES:
            size = f"{status.st_size / 1e6:.1f} MB"
            raise InputError.at(Place(path), None, f"{size}: configuration files are limited to 1 MB")
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise InputError.at(Place(path), None, f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        hint = " (it is UTF-16; save it as UTF-8)" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
        raise InputError.at(Place(path), None, f"not UTF-8 text at byte {error.start}{hint}") from None
    if "\0" in text:
        raise InputError.at(Place(path), None, "not a text file: it contains a null byte")
    return text
