"""`python -m tools.lint_evidence ARCHIVE...`: in which versions the source shows what the rules state.

The archives are wheels or source archives, read as text: nothing of them is installed or imported. The installed
versions are read too, and versions that the file has already stay. The result is `toolkit/linting/keys/evidence.json`.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from packaging.version import Version

from toolkit.linting.evidence import Evidence, folder_of, standing_in
from toolkit.linting.evidence_table import TABLE
from toolkit.linting.installed import installed

Seen = dict[str, dict[str, dict[str, list[str]]]]


def add(seen: Seen, package: str, version: str, folder: Path) -> None:
    """Add what a version's source shows of every rule of its package."""
    for code, evidence in TABLE.items():
        mine = [each for each in evidence if each.package == package]
        if mine:
            known = seen.setdefault(code, {}).setdefault(package, {"shown": [], "not_shown": []})
            _enter(known, version, all(_shown(each, folder) for each in mine))


def _shown(evidence: Evidence, folder: Path) -> bool:
    return standing_in(evidence, folder) == "shown"


def _enter(known: dict[str, list[str]], version: str, shown: bool) -> None:
    for words in known.values():
        if version in words:
            words.remove(version)
    words = known["shown" if shown else "not_shown"]
    words.append(version)
    words.sort(key=Version)


def main(archives: list[str]) -> None:
    """Read the archives and the installed packages, and write the file."""
    target = Path(str(files("toolkit.linting.keys"))) / "evidence.json"
    seen: Seen = json.loads(target.read_text(encoding="utf-8")) if target.is_file() else {}
    for archive in map(Path, archives):
        package, version = archive.name.removesuffix(".tar.gz").split("-")[:2]
        with tempfile.TemporaryDirectory() as unpacked:
            add(seen, package, version, _unpack(archive, Path(unpacked)) / package)
    for package in sorted({each.package for evidence in TABLE.values() for each in evidence}):
        here, folder = installed(package), folder_of(package)
        if here is not None and folder is not None:
            add(seen, package, here, folder)
    kept = {code: dict(sorted(seen[code].items())) for code in sorted(seen) if code in TABLE}
    target.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def _unpack(archive: Path, target: Path) -> Path:
    """Unpack a wheel or a source archive; returns the folder that has the package's folder."""
    shutil.unpack_archive(archive, target, "gztar" if archive.name.endswith(".tar.gz") else "zip")
    return next(target.iterdir()) if archive.name.endswith(".tar.gz") else target


if __name__ == "__main__":
    main(sys.argv[1:])
