"""Where the host waits for the device within optimizer steps, by the line that asks for it.

torch warns of each operation that synchronises (``torch.cuda.set_sync_debug_mode``) while it is called, so the stack
tells whose it is: the innermost line that is not torch's.
"""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import torch

_ROOT = Path(__file__).resolve().parents[2]
_WARNED = "called a synchronizing CUDA operation"
_BETWEEN = frozenset({"torch", "contextlib.py", "warnings.py", "threading.py"})
"""Frames between the caller and the call that waits for the device."""


def place(file: str) -> str:
    """A source file, named from its package on: ``toolkit/training/loop.py``."""
    parts = PurePath(file).parts
    for at in range(len(parts) - 1, -1, -1):
        if parts[at] in ("site-packages", "dist-packages"):
            return "/".join(parts[at + 1 :])
    if PurePath(file).is_relative_to(_ROOT):
        return PurePath(file).relative_to(_ROOT).as_posix()
    return parts[-1] if parts else file


def asked_by(stack: Iterable[Any], leave_out: str = __file__) -> str:
    """``file:line`` of the innermost frame of a stack (outermost first) that is neither torch's nor ``leave_out``'s."""
    for frame in reversed(list(stack)):
        named = place(frame.filename)
        if frame.filename != leave_out and named.split("/", maxsplit=1)[0] not in _BETWEEN:
            return f"{named}:{frame.lineno}"
    return "?"


@dataclass
class Waits:
    """How often each line made the host wait."""

    lines: Counter[str] = field(default_factory=Counter)
    steps: int = 0

    def to_json(self) -> dict[str, Any]:
        own = {line: count for line, count in self.lines.items() if line.startswith("toolkit/")}
        others = {line: count for line, count in self.lines.items() if line not in own}
        return {"steps": self.steps, "toolkit": own, "others": others}


@contextlib.contextmanager
def warned_waits(waits: Waits) -> Iterator[None]:
    """Inside, count torch's warnings of synchronising operations; other warnings go where they went."""
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=_WARNED)
        shown = warnings.showwarning

        def show(message: Any, *args: Any, **kwargs: Any) -> None:
            if _WARNED in str(message):
                waits.lines[asked_by(traceback.extract_stack())] += 1
            else:
                shown(message, *args, **kwargs)

        warnings.showwarning = show
        yield


@contextlib.contextmanager
def cuda_waits(waits: Waits) -> Iterator[None]:
    """Inside, torch warns of what synchronises with the GPU, and it is counted."""
    before = torch.cuda.get_sync_debug_mode()
    with warned_waits(waits):
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
