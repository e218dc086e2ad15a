"""The end of a message about a process that crashed in native code."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.launch.failure import last_words

STACK = 'Fatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n  File "a.py", line 3 in step\n'
WARNING = "/lib/utils.py:34: FutureWarning: gone soon\n  return func(*args, **kwargs)\n"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("malloc(): unaligned tcache chunk detected\n", "malloc(): unaligned tcache chunk detected; in "),
        (WARNING + "\n", "in "),
        (WARNING.splitlines()[0] + "\n", "in "),
        ("", "in "),
    ],
)
def test_what_the_c_library_said_is_told_and_no_warning_of_pythons(said: str, told: str, tmp_path: Path) -> None:
    log = tmp_path / "rank1.log"
    log.write_text(said + STACK)
    assert last_words(log) == f' ({told}File "a.py", line 3 in step)'
