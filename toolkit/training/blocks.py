"""Parts of a file, each validated while it is read, by the checksums of the file's blocks: one for each MiB."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Iterable
from io import RawIOBase
from pathlib import Path
from typing import Any

Report = Callable[[str], None]
"""Takes what is wrong with a file; may raise."""


class BlockReader:
    """Reads a file's bytes into memory. A block that is read in several parts, one after another, is read once."""

    def __init__(self, path: Path, entry: dict[str, Any] | None, report: Report) -> None:
        """``entry``: the file's in the manifest. Without it, or where an earlier version wrote it without checksums of
        blocks, nothing is validated here: ``read_manifest`` has hashed the whole file."""
        self._path, self._report = path, report
        self._block = entry["block_bytes"] if entry and "crc32" in entry else 0
        if entry is not None and self._block:
            self._size, self._sums = entry["bytes"], base64.b64decode(entry["crc32"])
        self._at, self._held = -1, bytearray()

    def read(self, runs: Iterable[tuple[int, memoryview]]) -> int:
        """Fill each memory with the bytes from a place on; returns how many there were. What is damaged is reported."""
        read = self._checked if self._block else _fill
        count = 0
        try:
            with self._path.open("rb", buffering=0) as file:
                for begin, into in runs:
                    count += read(file, begin, into)
        except OSError as error:
            self._report(f"{self._path}: {error.strerror}")
        return count

    def _checked(self, file: RawIOBase, begin: int, into: memoryview) -> int:
        done = 0
        while done < len(into) and begin + done < self._size:
            number, offset = divmod(begin + done, self._block)
            size = min(self._block, self._size - number * self._block)
            if offset == 0 and len(into) - done >= size and number != self._at:
                self._block_into(file, number, into[done : done + size])
                done += size
                continue
            if number != self._at:
                self._held, self._at = bytearray(size), number
                self._block_into(file, number, memoryview(self._held))
            part = memoryview(self._held)[offset : offset + len(into) - done]
            into[done : done + len(part)] = part
            done += len(part)
        return done

    def _block_into(self, file: RawIOBase, number: int, into: memoryview) -> None:
        _fill(file, number * self._block, into)
        if zlib.crc32(into) != int.from_bytes(self._sums[4 * number : 4 * number + 4], "little"):
            self._report(f"{self._path}: damaged: checksum mismatch in MiB {number}")


def _fill(file: RawIOBase, begin: int, into: memoryview) -> int:
    file.seek(begin)
    rest = into
    while rest and (read := file.readinto(rest)):  # a read gives 2 GiB at most
        rest = rest[read:]
    return len(into) - len(rest)
