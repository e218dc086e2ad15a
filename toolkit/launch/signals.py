"""Signals that ask a run to stop, and how a process is tied to the one that started it. No torch here."""

from __future__ import annotations

import ctypes
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

from toolkit.launch.failure import FOLDER_VARIABLE

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""Preemption, Ctrl-C, Slurm's warning, a terminal that was closed."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def handled() -> list[signal.Signals]:
    """Those that this process listens to: all, but for a hang-up that `nohup` has it ignore."""
    return [s for s in STOPS if s is not signal.SIGHUP or signal.getsignal(s) is not signal.SIG_IGN]


def exit_code(number: int) -> int:
    """What a shell says of a process that a signal has ended."""
    return 128 + number


def name_of(number: int) -> str:
    """How a user knows it."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def die_with_parent(number: signal.Signals = signal.SIGTERM) -> Callable[[], None]:
    """To be called in a child: the kernel sends it ``number`` when its parent ends, however that ends.

    Without it a killed launcher leaves ranks behind that continue to write into the run's folder.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl  # looked up before a fork

    def follow() -> None:
        prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)

    return follow


def attempt() -> int:
    """How often torchrun's agent has started this job again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def note_rank(rank: int) -> None:
    """Tell the launcher, where there is one, which process a rank is."""
    if (folder := os.environ.get(FOLDER_VARIABLE)) is not None:
        _write(Path(folder), f"pid{rank}", {"pid": os.getpid(), "attempt": attempt()})


def noted_ranks(folder: Path) -> dict[int, dict[str, int]]:
    """``pid`` and ``attempt`` of every rank that has begun."""
    return {int(p.stem[3:]): json.loads(p.read_text(encoding="utf-8")) for p in folder.glob("pid*.json")}


def note_stop(message: str, number: int) -> bool:
    """Leave for the launcher that the run has stopped as it was asked to; False if there is none to read it."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None:
        return False
    _write(Path(folder), "stopped", {"message": message, "signal": number})
    return True


def noted_stop(folder: Path) -> tuple[str, int] | None:
    """Message and signal of a run that has stopped."""
    try:
        note = json.loads((folder / "stopped.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return note["message"], note["signal"]


def _write(folder: Path, name: str, content: dict[str, object]) -> None:
    writing = folder / f".{name}"
    writing.write_text(json.dumps(content), encoding="utf-8")
    writing.rename(folder / f"{name}.json")
