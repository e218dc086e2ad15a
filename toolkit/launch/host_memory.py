"""How much memory the host had left before a process was killed, and whether the kernel killed one for it: afterwards
the memory is free again."""

from __future__ import annotations

import contextlib
import re
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

_SPAN_S = 10.0
_GIB = 2**30
_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_NO_LIMIT = 2**60
"""Bytes; version 1 of cgroups writes a number like this where there is no limit."""


class HostMemory:
    """Watches the available memory of the last seconds: the machine's, or a cgroup's (a container, a batch job) where
    that is less."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int, int]] = deque()
        self._kills = oom_kills()

    def look(self) -> None:
        """Note what is available now; nothing, where the machine does not say: the run goes on without it."""
        try:
            available, total = available_bytes()
        except (OSError, KeyError, ValueError):
            return
        now = time.monotonic()
        self._seen.append((now, available, total))
        while self._seen[0][0] < now - _SPAN_S:
            self._seen.popleft()

    def told(self) -> str:
        """Of a process that SIGKILL ended: who sent it as far as is known, and the least that was left in the last
        seconds. In words, in brackets, with a blank before them."""
        parts = []
        if self._seen:
            _, available, total = min(self._seen, key=lambda one: one[1])
            parts.append(
                f"{available / _GIB:.1f} of {total / _GIB:.1f} GiB were left at the least in its last {_SPAN_S:.0f} s"
            )
        kills = oom_kills()
        if kills is not None and self._kills is not None:
            if kills > self._kills:
                parts.insert(0, "the kernel has ended a process for lack of it since the start")
                return f" (out of host memory: {'; '.join(parts)})"
            parts.append("the kernel has ended no process for lack of it since the start")
        return f" (out of host memory?{' ' if parts else ''}{'; '.join(parts)})"


def available_bytes() -> tuple[int, int]:
    """Bytes that are available, and all: of the machine, or of a cgroup with less. Raises OSError, KeyError or
    ValueError where the machine does not say."""
    fields = {}
    for line in (_PROC / "meminfo").read_text(encoding="ascii").splitlines():
        name, _, rest = line.partition(":")
        fields[name] = int(rest.split()[0]) * 1024
    states = [(fields["MemAvailable"], fields["MemTotal"])]
    for folder, limit, used in _cgroups():
        with contextlib.suppress(OSError, ValueError):
            most = int((folder / limit).read_text(encoding="ascii"))  # "max": no limit
            if most < _NO_LIMIT:
                now = int((folder / used).read_text(encoding="ascii")) - _droppable(folder)
                states.append((max(0, most - now), most))
    return min(states)


def oom_kills() -> int | None:
    """How many processes the kernel has killed for lack of memory, of this machine and of this cgroup; None where
    neither is said."""
    counts = []
    folders = (folder for folder, _, _ in _cgroups())
    files = [
        _PROC / "vmstat",
        *(folder / name for folder in folders for name in ("memory.events", "memory.oom_control")),
    ]
    for file in files:
        with contextlib.suppress(OSError):
            if match := re.search(r"^oom_kill (\d+)$", file.read_text(encoding="ascii"), re.MULTILINE):
                counts.append(int(match[1]))
    return sum(counts) if counts else None


def _cgroups() -> Iterator[tuple[Path, str, str]]:
    """Folders of this process's cgroups that may limit its memory, from its own to the outermost, with the names of the
    files for the limit and for what is used. In a container the path may not be there, its outermost folder is."""
    try:
        lines = (_PROC / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, limit, used = _CGROUPS, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            top, limit, used = _CGROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = top / path.lstrip("/")
        for one in (folder, *folder.parents):
            yield one, limit, used
            if one == top:
                break


def _droppable(folder: Path) -> int:
    """Bytes of the file cache that the kernel drops before it kills."""
    text = (folder / "memory.stat").read_text(encoding="ascii")
    match = re.search(r"^total_inactive_file (\d+)$", text, re.MULTILINE) or re.search(
        r"^inactive_file (\d+)$", text, re.MULTILINE
    )
    return int(match[1]) if match else 0
