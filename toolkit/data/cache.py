"""Tokenised samples on disk: made once by one process, mapped into memory by the others and by later runs.

An entry is one Arrow file named after its key, with a row per sample (``input_ids``, ``labels``, ``cut``, and ``media``
where samples have images or recordings). It never changes: it is written under a temporary name, flushed, and renamed.
The writer holds a kernel lock, which ends with its process.

The cache only saves time: if it is not available, samples are tokenised in memory and a note says why.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.data.columns import Columns
from toolkit.disk import flush_to_disk

FOLDER_VARIABLE = "TOOLKIT_CACHE"
LEAST_BYTES = 2**20
"""Smaller data is not cached unless ``data.cache`` names a folder: tokenising it takes as long as opening an entry
(docs/measurements/token-cache.md)."""
MOST_BYTES = 20 * 2**30
"""Limit for all entries of a folder; the least recently used are deleted first, the newest is always kept."""
PATIENCE = 60.0
"""Seconds without a heartbeat from the tokenising process, after which the others tokenise themselves."""
_ENDING = struct.Struct("<I4s")
_MARK = b"tok1"
_ABOUT = b"about"
_BEAT = 1.0
_POLL = 0.1
_OLD_PARTIAL = 24 * 3600.0


def default_folder() -> Path:
    """``$TOOLKIT_CACHE``, or a folder in the user's cache (XDG base directory specification)."""
    if named := os.environ.get(FOLDER_VARIABLE):
        return Path(named)
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "toolkit" / "tokens"


@dataclass
class Outcome:
    """The samples, and their origin: «cache», «made» (tokenised and cached) or «memory» (tokenised, not cached).

    ``notes``: messages for the user.
    """

    columns: Columns
    came: str
    seconds: float = 0.0
    path: Path | None = None
    notes: list[str] = field(default_factory=list)


Counted = Callable[[int], None]
"""Takes how many rows are tokenised."""
Make = Callable[[Counted], Columns]
"""Tokenises everything; calls its argument after every row, as a heartbeat."""


def _unseen(rows: int) -> None:
    """A ``Counted`` that nobody looks at."""


def cached(folder: Path, key: str, make: Make, waiting: Counted = _unseen, patience: float = PATIENCE) -> Outcome:
    """The samples of ``key``, from ``folder`` or from ``make``; every process calls it, one of them tokenises.
    ``waiting``: told the rows of the one that this process waits for.

    Raises what ``make`` raises; problems with the cache do not raise.
    """
    started = time.perf_counter()
    target = folder / f"{key}.arrow"
    notes: list[str] = []
    found = _open(target, notes)
    came = "cache"
    if found is None:
        found, came = _made(target, make, waiting, patience, notes)
    kept = target if came != "memory" else None
    return Outcome(found, came, time.perf_counter() - started, kept, notes)


def _made(target: Path, make: Make, waiting: Counted, patience: float, notes: list[str]) -> tuple[Columns, str]:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.with_suffix(".lock"), waiting, patience) as beat:
            if beat is None:
                notes.append(f"{target}: no heartbeat from the tokenising process for {patience:.0f} s")
                return make(_unseen), "memory"
            found = _open(target, [])  # made meanwhile
            if found is not None:
                return found, "cache"
            return _make_and_keep(target, make, beat, notes)
    except _NoCache as error:
        notes.append(f"{error}: samples are not cached; set data.cache to another folder, or to false")
        return error.columns or make(_unseen), "memory"
    except OSError as error:
        if error.filename is None or not str(error.filename).startswith(str(target.parent)):
            raise  # of the data, not of the cache
        notes.append(
            f"{error.filename}: {error.strerror}: samples are not cached; set data.cache to another folder, or to false"
        )
        return make(_unseen), "memory"


class _NoCache(Exception):
    """The folder cannot be used. ``columns``: samples that are already tokenised."""

    def __init__(self, message: str, columns: Columns | None = None) -> None:
        super().__init__(message)
        self.columns = columns


def _make_and_keep(target: Path, make: Make, beat: Counted, notes: list[str]) -> tuple[Columns, str]:
    for left in target.parent.glob(f"{target.stem}.*.partial"):
        left.unlink(missing_ok=True)  # of a maker that was killed: this process has its lock
    columns = make(beat)
    partial = target.parent / f"{target.stem}.{os.getpid()}.partial"
    try:
        _write(columns, partial)
        partial.replace(target)
        flush_to_disk(target.parent)
        found = _open(target, notes)
    except Exception as error:  # a full disk, mostly; Arrow has its own kinds of it
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise _NoCache(f"{partial}: {getattr(error, 'strerror', None) or error}", columns) from None
    _trim(target)
    return found or columns, "made" if found else "memory"


# ---------------------------------------------------------------------- one entry


def _write(columns: Columns, partial: Path) -> None:
    """An Arrow stream, and after its end (where readers stop) eight bytes: the CRC-32 of all before them."""
    import pyarrow

    table = {
        "input_ids": _lists(columns.ids, columns.id_ends),
        "labels": _lists(columns.labels, columns.label_ends),
        "cut": pyarrow.array(np.asarray(columns.cut, dtype=np.int8)),
    }
    if len(columns.media_ends) > 1:
        files = pyarrow.LargeBinaryArray.from_buffers(
            pyarrow.large_binary(), len(columns.media_ends) - 1,
            [None, *(pyarrow.py_buffer(one) for one in (columns.media_ends, columns.media))],
        )  # fmt: skip
        table["media"] = pyarrow.LargeListArray.from_arrays(
            pyarrow.array(np.asarray(columns.media_counts, dtype=np.int64)), files
        )
    batch = pyarrow.RecordBatch.from_pydict(table, metadata={_ABOUT: json.dumps(columns.about)})
    with partial.open("w+b") as file:
        with pyarrow.ipc.new_stream(file, batch.schema) as writer:
            writer.write_batch(batch)
        file.flush()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
            total = zlib.crc32(whole)
        file.seek(0, os.SEEK_END)
        file.write(_ENDING.pack(total, _MARK))
        file.flush()
        os.fsync(file.fileno())


def _lists(values: Any, ends: Any) -> Any:
    import pyarrow

    offsets = pyarrow.array(np.asarray(ends, dtype=np.int64))
    return pyarrow.LargeListArray.from_arrays(offsets, pyarrow.array(np.asarray(values, dtype=np.int32)))


def _open(target: Path, notes: list[str]) -> Columns | None:
    """The entry, mapped and verified by its checksum; None if there is no valid one."""
    try:
        with target.open("rb") as file:
            whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        total, mark = _ENDING.unpack(whole[-_ENDING.size :])
        if mark != _MARK or zlib.crc32(whole[: -_ENDING.size]) != total:
            raise ValueError("checksum mismatch")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, struct.error) as error:
        notes.append(f"{target} is damaged ({error}): tokenising again")
        return None
    import pyarrow

    with contextlib.suppress(OSError):  # another user's
        os.utime(target)  # recently used: deleted last
    batch = pyarrow.ipc.open_stream(pyarrow.py_buffer(whole)).read_next_batch()
    ids, labels, cut = (batch.column(name) for name in ("input_ids", "labels", "cut"))
    # Nothing is copied; the map lives as long as one of these.
    found = Columns(
        ids.values.to_numpy(), labels.values.to_numpy(), ids.offsets.to_numpy(), labels.offsets.to_numpy(),
        cut.to_numpy(),
    )  # fmt: skip
    found.about = json.loads((batch.schema.metadata or {}).get(_ABOUT, b"{}"))
    if "media" in batch.schema.names:
        media = batch.column("media")
        _, ends, data = media.values.buffers()
        found.media, found.media_ends = memoryview(data), np.frombuffer(ends, dtype=np.int64)
        found.media_counts = media.offsets.to_numpy()
    return found


def _trim(newest: Path) -> None:
    """Delete the least recently used entries above ``MOST_BYTES``, and files left by killed writers."""
    with contextlib.suppress(OSError):
        entries = sorted(newest.parent.glob("*.arrow"), key=lambda path: path.stat().st_mtime, reverse=True)
        entries = [newest, *(path for path in entries if path != newest)]
        total = 0
        for path in entries:
            total += path.stat().st_size
            if total > MOST_BYTES and path != newest:
                path.unlink(missing_ok=True)  # who has it mapped keeps it
        for path in newest.parent.glob("*.partial"):
            if time.time() - path.stat().st_mtime > _OLD_PARTIAL:
                path.unlink(missing_ok=True)


# ---------------------------------------------------------------------- who makes it


@contextlib.contextmanager
def _lock(path: Path, waiting: Counted, patience: float) -> Iterator[Counted | None]:
    """Holds the lock and yields a heartbeat function; yields None if the holder's heartbeat stopped.

    The kernel frees the lock when its holder ends, so nothing can be left behind. A holder that hangs (a stopped
    process, an unresponsive disk) is detected by the lock file's time.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        held = _wait_for(handle, waiting, patience)
        try:
            yield _Beat(handle) if held else None
        finally:
            if held:
                path.unlink(missing_ok=True)  # the entry is there, or the next one makes it
    finally:
        os.close(handle)


def _wait_for(handle: int, waiting: Counted, patience: float) -> bool:
    seen, since = None, time.monotonic()
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            pass
        except OSError:
            return True  # a file system without locks: every process tokenises, the last rename wins
        now = os.fstat(handle).st_mtime_ns
        if now != seen:
            seen, since = now, time.monotonic()
            waiting(_rows_of(handle))
        if time.monotonic() - since > patience:
            return False
        time.sleep(_POLL)


def _rows_of(handle: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(os.pread(handle, 20, 0))
    return 0  # of an earlier version, or not written yet


class _Beat:
    """The lock file's time, and in it how many rows are tokenised."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._next = 0.0

    def __call__(self, rows: int) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _BEAT
            os.pwrite(self._handle, f"{rows:<20}".encode(), 0)
            os.utime(self._handle)
