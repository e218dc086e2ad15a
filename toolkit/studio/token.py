"""The token of a server, kept for the folders that it serves: open tabs go on working after a restart."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path

_FORM = re.compile(r"[\w-]{32}")


def kept_token(roots: Sequence[Path]) -> str:
    """The token of these folders, in a file that only its owner can read; a new one where there is none, where the file
    is not safe, or where none can be kept."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "toolkit" / "studio"
    named = hashlib.sha256("\0".join(map(str, roots)).encode("utf-8", "surrogateescape")).hexdigest()[:24]
    file = cache / f"{named}.token"
    token = secrets.token_urlsafe(24)
    try:
        if (found := _read(file)) is not None:
            return found
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except OSError:  # a home that cannot be written: the token is this server's alone
        return token
    with os.fdopen(handle, "w", encoding="ascii") as opened:
        opened.write(token)
    return token


def _read(file: Path) -> str | None:
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    with os.fdopen(handle, encoding="ascii", errors="replace") as opened:
        about = os.fstat(handle)
        private = stat.S_ISREG(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o077
        found = opened.read(64) if private else ""
    return found if _FORM.fullmatch(found) else None
