"""Files in the test's folder, and traps: files with a mistake, and the same files without it."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from toolkit.linting.model import Files, Reader


def put(files: Files) -> list[str]:
    """Write the files by name into the current folder; returns the names."""
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text, encoding="utf-8")
    return list(files)


@dataclass
class Trap:
    """``place``: file and line of the finding. ``judge``: makes of the files what the packages make of them.
    ``refused``: the packages raise at the failing files."""

    code: str
    place: str
    fails: Files
    passes: Files
    judge: Callable[[Files], Any] | None = None
    reader: Reader | None = None
    refused: bool = True

    @property
    def id(self) -> str:
        return f"{self.code}-{self.place}-{zlib.crc32(str(self.fails).encode()) % 1000}"

    def agreed(self, errors: tuple[type[BaseException], ...]) -> None:
        """The packages say of both files what the linter says; where they refuse they raise one of ``errors``."""
        assert self.judge is not None
        put(self.fails)
        if self.refused:
            with pytest.raises(errors):
                self.judge(self.fails)
        else:
            self.judge(self.fails)
        put(self.passes)
        self.judge(self.passes)
