"""The folders that Studio was given: every file that it opens for a request is inside one of them."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import InputError

MAX_FILE = 16 << 20


@dataclass(frozen=True)
class Folders:
    """``roots``: absolute, without symbolic links."""

    roots: tuple[Path, ...]

    @classmethod
    def of(cls, given: Sequence[str | Path]) -> Folders:
        """Raises InputError for one that is not a folder."""
        found = []
        for folder in given:
            path = Path(folder).expanduser().resolve()
            if not path.is_dir():
                raise InputError(f"{folder}: not a folder")
            found.append(path)
        return cls(tuple(dict.fromkeys(found)))

    def inside(self, name: str) -> Path:
        """The file or folder of a name that a request gave: absolute, or relative to the first root. Symbolic links
        are followed before the check. Raises InputError if it is outside, whether it exists or not."""
        outside = InputError(f"{shown(name)}: not in a folder that studio was started with")
        if not self.roots or not name or "\0" in name or len(name) > 4096:
            raise outside
        try:
            path = Path(os.path.realpath(self.roots[0] / name))
        except (OSError, ValueError, RuntimeError):
            raise outside from None
        if not any(path == root or root in path.parents for root in self.roots):
            raise outside
        return path

    def text(self, name: str, limit: int = MAX_FILE) -> str:
        """A file's text, undecodable bytes replaced. Raises InputError if it is outside, not a regular file, or larger
        than ``limit`` bytes."""
        path = self.inside(name)
        data = read_regular(path, limit + 1)
        if len(data) > limit:
            raise InputError(f"{shown(name)}: larger than {limit >> 20} MiB")
        return data.decode("utf-8", "replace")


def read_regular(path: Path, limit: int, start: int = 0) -> bytes:
    """Up to ``limit`` bytes of a regular file from ``start``: never of a pipe or device, which would block, and never
    through a link put there after the check. Raises InputError."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "cannot be read"
        raise InputError(f"{shown(path.name)}: {why}") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise InputError(f"{shown(path.name)}: not a regular file")
    with os.fdopen(handle, "rb") as file:
        file.seek(start)
        return file.read(limit)


def shown(name: str) -> str:
    """A name as messages show it: short, without control characters."""
    clean = "".join(character if character.isprintable() else "�" for character in str(name))
    return clean if len(clean) <= 120 else f"{clean[:117]}..."
