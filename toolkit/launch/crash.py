"""What a process that crashed in native code has left in its log. It can report nothing itself."""

from __future__ import annotations

import signal
from pathlib import Path

CRASHES = frozenset({signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV})
"""Signals of which Python's faulthandler writes where in Python the process was."""


def last_words(log: Path) -> str:
    """As the end of a message: what the process that ``log`` belongs to said last (the C library, of a broken heap),
    and where in Python it was. Empty where faulthandler has written nothing."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    before, fatal, after = text.rpartition("Fatal Python error: ")
    if not fatal:
        return ""
    said = next((line for line in reversed(before.splitlines()) if line.strip()), "")
    if said[:1].isspace() or "Warning: " in said:  # a warning of Python's, the code that gave it below it
        said = ""
    stack = after.rpartition("Current thread")[2]  # other threads may come first
    frame = next((line.strip() for line in stack.splitlines() if line.lstrip().startswith("File ")), "no Python code")
    return f" ({said + '; ' if said else ''}in {frame})"
