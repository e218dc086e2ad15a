"""Files in the test's folder."""

from __future__ import annotations

from pathlib import Path

from toolkit.linting.model import Files


def put(files: Files) -> list[str]:
    """Write the files by name into the current folder; returns the names."""
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text, encoding="utf-8")
    return list(files)
