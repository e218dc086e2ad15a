"""Applies safe fixes in rounds until none is left; each file is written completely or not at all."""

from __future__ import annotations

import contextlib
import difflib
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from toolkit.errors import InputError, Place
from toolkit.linting.edits import apply
from toolkit.linting.engine import Report, check
from toolkit.linting.files.load import Loaded, read_sources
from toolkit.linting.files.tree import Source
from toolkit.linting.model import Edit, Reader

_ROUNDS = 10


@dataclass
class Fixed:
    """Texts before and after, the titles of the applied fixes, and the remaining findings."""

    before: dict[str, str]
    after: dict[str, str]
    titles: list[str] = field(default_factory=list)
    report: Report | None = None

    @property
    def changed(self) -> list[str]:
        """The files whose text changes."""
        return [path for path in self.before if self.before[path] != self.after[path]]


def plan(
    loaded: Loaded,
    *,
    reader: Reader | None = None,
    select: tuple[str, ...] = (),
    ignore: tuple[str, ...] = (),
) -> Fixed:
    """Work the fixes out in memory; a change that does not parse any more is not made."""
    before = {source.path: source.text for source in loaded.sources}
    fixed = Fixed(before, dict(before))
    for _ in range(_ROUNDS):
        fixed.report = check(loaded, reader=reader, select=select, ignore=ignore)
        edits = _edits(fixed.report, fixed)
        changed = False
        for path, changes in edits.items():
            text = apply(fixed.after[path], changes)
            sources = _reread(path, text, loaded)
            if sources is not None and text != fixed.after[path]:
                fixed.after[path], changed = text, True
                loaded.sources = [s for s in loaded.sources if s.path != path] + sources
        loaded.sources.sort(key=lambda s: list(before).index(s.path))
        if not changed:
            break
    return fixed


def _edits(report: Report, fixed: Fixed) -> dict[str, list[Edit]]:
    """This round's edits by file: fixes that touch what another one touches wait for the next round."""
    taken: dict[str, list[Edit]] = {}
    changing = {e.file for f in report.findings if f.fix for e in f.fix.edits if e.start != e.end}
    for finding in report.findings:
        if finding.fix is None:
            continue
        # New keys wait until the others are mended: the key may be there under a misspelt name.
        if any(edit.start == edit.end and edit.file in changing for edit in finding.fix.edits):
            continue
        clash = any(
            edit.start <= other.end and other.start <= edit.end
            for edit in finding.fix.edits
            for other in taken.get(edit.file, [])
        )
        if clash:
            continue
        for edit in finding.fix.edits:
            taken.setdefault(edit.file, []).append(edit)
        fixed.titles.append(f"{finding.place}: {finding.code} {finding.fix.title}")
    return taken


def _reread(path: str, text: str, loaded: Loaded) -> list[Source] | None:
    olds = [source for source in loaded.sources if source.path == path]
    try:
        sources = read_sources(path, text)
    except InputError:
        return None
    if [s.kind for s in sources] != [s.kind for s in olds]:
        return None
    for source, old in zip(sources, olds, strict=True):
        source.named_by, source.names = old.named_by, old.names
    return sources


def diff(fixed: Fixed) -> str:
    """The changes as a unified diff."""
    lines: list[str] = []
    for path in fixed.changed:
        old, new = fixed.before[path].splitlines(True), fixed.after[path].splitlines(True)
        for line in difflib.unified_diff(old, new, path, path):
            lines.append(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n")
    return "".join(lines)


def write(fixed: Fixed) -> None:
    """Write the changed files, each in one step; raises InputError if one cannot be written."""
    for path in fixed.changed:
        write_whole(path, fixed.after[path])


def write_whole(path: str | Path, text: str) -> None:
    """Replace a file atomically: a killed process leaves the complete old or new file. A symlink still points to the
    same file, which is replaced and keeps its mode."""
    target = Path(os.path.realpath(path))
    temporary: str | None = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            os.chmod(temporary, target.stat().st_mode & 0o7777)
        os.replace(temporary, target)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise InputError.at(Place(path), None, f"cannot be written: {error.strerror}") from None
