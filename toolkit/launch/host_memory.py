"""How much memory the host had left before a process was killed: afterwards it is free again."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from pathlib import Path

_SPAN_S = 10.0
_GIB = 2**30
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


class HostMemory:
    """Watches the available memory of the last seconds: the machine's, or the container's where that is less."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()
        self.total = 0

    def look(self) -> None:
        """Note what is available now; nothing, where the machine does not say: the run goes on without it."""
        try:
            available, self.total = available_bytes()
        except (OSError, KeyError, ValueError):
            return
        now = time.monotonic()
        self._seen.append((now, available))
        while self._seen[0][0] < now - _SPAN_S:
            self._seen.popleft()

    def told(self) -> str:
        """The least of the last seconds, in words, with a blank before them; empty if it is not known."""
        if not self._seen:
            return ""
        least = min(available for _, available in self._seen)
        return f" {least / _GIB:.1f} of {self.total / _GIB:.1f} GiB were left at the least in its last {_SPAN_S:.0f} s"


def available_bytes() -> tuple[int, int]:
    """Bytes that are available, and all."""
    fields = {}
    for line in _MEMINFO.read_text(encoding="ascii").splitlines():
        name, _, rest = line.partition(":")
        fields[name] = int(rest.split()[0]) * 1024
    found = [(fields["MemAvailable"], fields["MemTotal"])]
    with contextlib.suppress(OSError):  # no container, or cgroup version 1
        limit, used = (_CGROUP / "memory.max").read_text().strip(), (_CGROUP / "memory.current").read_text()
        if limit != "max":
            found.append((max(0, int(limit) - int(used)), int(limit)))
    return min(found)
