"""What both demos share: headings with the time, the toolkit's commands, and a word while something takes long."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path("runs/demo")
HERE = Path(__file__).parent
RECIPES = HERE.relative_to(Path.cwd()) if HERE.is_relative_to(Path.cwd()) else HERE
START = time.perf_counter()
SECONDS_BETWEEN_WORDS = 5.0


def seconds() -> float:
    """Since the demo began."""
    return time.perf_counter() - START


def say(text: str) -> None:
    print(f"\n== {text} · {seconds():.0f} s", flush=True)


def toolkit(*arguments: str) -> None:
    """Run one of the toolkit's commands as a user types it. Raises CalledProcessError where it fails."""
    subprocess.run(started(*arguments), check=True, timeout=1800)


def started(*arguments: str) -> list[str]:
    """Show a command as a user types it; returns its words for this Python."""
    print(f"$ toolkit {' '.join(arguments)}", flush=True)
    return [sys.executable, "-m", "toolkit", *arguments]


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Say every few seconds that ``what`` is still going on."""
    done = threading.Event()

    def speak() -> None:
        while not done.wait(SECONDS_BETWEEN_WORDS):
            print(f"   {what}: {seconds():.0f} s", flush=True)

    speaker = threading.Thread(target=speak, daemon=True)
    speaker.start()
    try:
        yield
    finally:
        done.set()
        speaker.join()
