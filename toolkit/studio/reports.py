"""The HTML pages that the toolkit's commands have written into the given folders."""

from __future__ import annotations

import html
import os
import re
from pathlib import Path
from typing import Any

from toolkit.errors import InputError
from toolkit.studio.folders import MAX_FILE, Folders, read_regular

# Every page of toolkit/report begins so. Other pages are not shown.
_OURS = b"<!doctype html><html lang='en'><head><meta charset='utf-8'>"
_TITLE = re.compile(r"<title>(.*?)</title>", re.S)
_MOST, _SEEN, _DEPTH = 200, 20_000, 5


def find_reports(folders: Folders) -> list[dict[str, Any]]:
    """The latest first: name of the file, title, and when it was written."""
    found: list[dict[str, Any]] = []
    for root in folders.roots:
        seen = 0
        for folder, inner, names in os.walk(root):
            deep = len(Path(folder).relative_to(root).parts)
            inner[:] = sorted(n for n in inner if not n.startswith(".") and n not in ("node_modules", "site-packages"))
            if deep >= _DEPTH:
                inner.clear()
            seen += len(names) + len(inner)
            found += [
                report for name in names if name.endswith(".html") and (report := _report(Path(folder) / name, root))
            ]
            if seen > _SEEN or len(found) > 5 * _MOST:
                break
    return sorted(found, key=lambda one: -one["written"])[:_MOST]


def read_report(folders: Folders, name: str) -> str:
    """The page; raises InputError if it is outside, or was not written by the toolkit."""
    text = folders.text(name)
    if not text.encode().startswith(_OURS):
        raise InputError("not a page of the toolkit")
    return text


def _report(file: Path, root: Path) -> dict[str, Any] | None:
    try:
        head = read_regular(file, 4096)
        size, written = file.stat().st_size, file.stat().st_mtime
    except (InputError, OSError):
        return None
    if not head.startswith(_OURS) or size > MAX_FILE:
        return None
    title = _TITLE.search(head.decode("utf-8", "replace"))
    return {
        "name": str(file),
        "shown": str(file.relative_to(root)),
        "title": html.unescape(title.group(1)) if title else file.stem,
        "written": written,
    }
