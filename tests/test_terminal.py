"""What a terminal shows while something takes long."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import sys, time
from toolkit.terminal import working
taken = lambda: len(sys.argv) > 1 and time.monotonic() - began > 0.3
began = time.monotonic()
with working("loading the model", taken) as doing:
    time.sleep(0.6)
    doing("reading the data")
    time.sleep(0.6)
print("done")
"""


def on_a_terminal(*arguments: str) -> list[tuple[float, str]]:
    """What a terminal is sent, with the seconds since the start."""
    own, other = pty.openpty()
    began, received = time.monotonic(), []
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments], stdin=subprocess.DEVNULL, stdout=other, stderr=other,
        env=environment, cwd=Path(__file__).parents[1],
    ) as process:  # fmt: skip
        os.close(other)
        while process.poll() is None or select.select([own], [], [], 0)[0]:
            if select.select([own], [], [], 0.1)[0]:
                try:
                    received.append((time.monotonic() - began, os.read(own, 4096).decode()))
                except OSError:
                    break
    os.close(own)
    return received


@pytest.mark.usefixtures("launches")
def test_a_line_says_what_is_done_and_goes() -> None:
    text = "".join(part for _, part in on_a_terminal())
    first, second = text.index("loading the model … 0 s"), text.index("reading the data … ")
    assert first < second < text.index("\r\x1b[Kdone")


@pytest.mark.usefixtures("launches")
def test_the_line_goes_when_another_process_takes_the_screen() -> None:
    text = "".join(part for _, part in on_a_terminal("taken"))
    assert "loading the model" in text
    assert "reading the data" not in text


@pytest.mark.usefixtures("launches")
def test_without_a_terminal_nothing_is_said() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60,
                          cwd=Path(__file__).parents[1])  # fmt: skip
    assert (done.stdout, done.stderr) == ("done\n", "")
