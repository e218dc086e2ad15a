"""Traces kept on disk between plans: importing torch, transformers and PEFT takes most of a plan's time.

An entry is one JSON file with what a planner knows of one model, training and row length: its weights and the traces
made so far. Its name is the hash of its key (toolkit/planning/cache_key.py), which it also contains. A file is ignored
and written again if its checksum, its key or the sources that its traces ran are not the same. Files are written under
a temporary name and renamed, so that two processes may plan at once: the last one's traces stay.

The cache only saves time. Where its folder cannot be written, plans are made without it, and a line says why.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.planning.cache_key import changed_since, entry_key, source_stamps, unchanged
from toolkit.planning.stored import (
    contents_from,
    contents_to,
    shape_name,
    trace_from,
    trace_to,
)

if TYPE_CHECKING:
    from toolkit.planning.contents import Contents
    from toolkit.planning.images import Images
    from toolkit.planning.loops import Loop
    from toolkit.planning.segments import Shape, Traced
    from toolkit.recipe.resolve import Resolved

VARIABLE = "TOOLKIT_PLAN_CACHE"
"""A folder, or «off»."""
MOST_BYTES = 64 * 2**20
"""Limit of all entries; those that were read longest ago are deleted first. An entry of an 8B model has 0.1 MB."""
_OLD_PARTIAL = 3600.0
"""Seconds after which a temporary file belongs to no process any more."""
_DAMAGED = (KeyError, IndexError, TypeError, ValueError, AttributeError)
"""What reading a file raises that is no entry: it is made again."""


def default_folder() -> Path | None:
    """``$TOOLKIT_PLAN_CACHE``, or a folder in the user's cache (XDG base directory specification); None: it is off."""
    if named := os.environ.get(VARIABLE):
        return None if named == "off" else Path(named)
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "toolkit" / "plans"


class Entry:
    """What is kept of one planner. ``contents``: of its model, None if it was not there."""

    def __init__(self, path: Path, key: str) -> None:
        self.path, self.key = path, key
        self.contents: Contents | None = None
        self.notes: list[str] | None = None
        self._traces: dict[str, Any] = {}
        self._sources: dict[str, list[int]] = {}
        self._new = False
        if (document := _read(path, key)) is not None:
            try:
                self.contents = contents_from(document["contents"])
                self.notes, self._traces = document["notes"], dict(document["traces"])
                self._sources = document["sources"]
            except _DAMAGED:
                self.contents = None

    def describe(self, contents: Contents) -> None:
        """Keep the contents of the model."""
        self.contents, self._new = contents, True

    def add_notes(self, notes: list[str]) -> None:
        """Keep what each row contains, in words."""
        self.notes, self._new = notes, True

    def trace(self, shape: Shape) -> Traced | None:
        """A trace of ``shape``, None if it was not kept."""
        found = self._traces.get(shape_name(shape))
        try:
            return None if found is None else trace_from(found, shape)
        except _DAMAGED:
            return None

    def add(self, traced: Traced) -> None:
        """Keep one more trace."""
        self._traces[shape_name(traced.shape)] = trace_to(traced)
        self._new = True

    def save(self) -> None:
        """Write the entry if it has anything new, with the traces that another process has written meanwhile. Raises
        OSError."""
        if not self._new or self.contents is None:
            return
        other = _read(self.path, self.key) or {}
        document = {
            "key": self.key,
            "sources": {**self._sources, **other.get("sources", {}), **source_stamps()},
            "contents": contents_to(self.contents),
            "notes": self.notes,
            "traces": {**other.get("traces", {}), **self._traces},
        }
        body = json.dumps(document, separators=(",", ":"))
        _write(self.path, f"{_checksum(body)}\n{body}")
        self._new = False


class Cache:
    """The entries that one plan reads and makes, in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started = time.time_ns()
        self._entries: dict[str, Entry] = {}

    def entry(self, key: str) -> Entry:
        """The entry of ``key``, empty if there is none."""
        if key not in self._entries:
            name = hashlib.sha256(key.encode()).hexdigest()
            self._entries[key] = Entry(self.folder / f"{name}.json", key)
        return self._entries[key]

    def save(self) -> None:
        """Write what is new and keep to the limit. A folder that cannot be written costs the next plan its time
        alone: one line to standard error says so."""
        if changed_since(self._started):
            return  # what was imported may not be what is on disk now
        try:
            for entry in self._entries.values():
                entry.save()
            _keep_to(MOST_BYTES, self.folder)
        except OSError as error:
            name = error.filename or self.folder
            why = f"{name} cannot be written ({error.strerror})"
            print(f"{why}: traces are not kept; set {VARIABLE} to a folder or to off", file=sys.stderr)


_active: ContextVar[Cache | None] = ContextVar("plan_cache", default=None)


@contextlib.contextmanager
def caching(folder: Path | None) -> Iterator[None]:
    """Inside, planners take traces from ``folder`` and leave theirs there; None: they do not."""
    cache = None if folder is None else Cache(folder)
    token = _active.set(cache)
    try:
        yield
    finally:
        _active.reset(token)
    if cache is not None:
        cache.save()


def entry(resolved: Resolved, length: int, loop: Loop, images: Images | None) -> Entry | None:
    """The entry of a planner; None where nothing is cached, or where the key cannot say what its traces depend on."""
    cache = _active.get()
    if cache is None or (key := entry_key(resolved, length, loop, images)) is None:
        return None
    return cache.entry(key)


def _read(path: Path, key: str) -> dict[str, Any] | None:
    """The document of an entry; None if there is none, or if it is damaged, of another key or of other sources."""
    try:
        text = path.read_text(encoding="utf-8")
        checksum, _, body = text.partition("\n")
        if checksum != _checksum(body):
            return None
        document = json.loads(body)
        if document["key"] != key or not unchanged(document["sources"]):
            return None
        os.utime(path)  # read just now: deleted last
        return dict(document)
    except (OSError, *_DAMAGED):  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        return None


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".", suffix=".partial", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _keep_to(most: int, folder: Path) -> None:
    """Delete the entries that were read longest ago until the others have at most ``most`` bytes."""
    if not folder.is_dir():
        return
    found = []
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process deletes too
            status = path.stat()
            if path.suffix == ".json":
                found.append((status.st_mtime, status.st_size, path))
            elif path.suffix == ".partial" and time.time() - status.st_mtime > _OLD_PARTIAL:
                path.unlink()
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= most:
            break
        path.unlink(missing_ok=True)
        total -= size


def _checksum(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()
