"""``manifest.json``: what a checkpoint contains, and size and SHA-256 of its files to validate them."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

from toolkit.disk import file_sha256, flush_to_disk
from toolkit.errors import InputError

MANIFEST = "manifest.json"
_SEAL = "manifest_sha256"


class Damaged(InputError):
    """A checkpoint that is not what was written; an earlier one may be whole."""


Share = tuple[int, int]
"""A rank and the number of ranks that hash the files between them."""
Seen = tuple[Any, ...]
"""A manifest's checksum, then of every file its inode, size and time of its last change."""
_SETTLED_S = 2.0
"""A file that changed less than so many seconds ago could change again within the same tick of the clock of its disk
(FAT: two seconds, others less)."""
_hashed: dict[tuple[Path, Share, bool], Seen] = {}
"""What this process has hashed (True: of files without checksums of blocks): a checkpoint is found, and then used."""


def write_manifest(folder: Path, content: dict[str, Any], known: dict[str, Any] | None = None) -> None:
    """Seal ``folder``: size and SHA-256 of every file in it, flushed to the disk before the manifest is, and the
    manifest's own. ``known``: those of files that are flushed and hashed already. Raises OSError if one of these is
    missing or has another size."""
    files = {}
    for path in sorted(p for p in folder.iterdir() if p.name != MANIFEST):
        size = path.stat().st_size
        if known is None or path.name not in known:
            flush_to_disk(path)
            files[path.name] = {"bytes": size, "sha256": file_sha256(path)}
        elif known[path.name]["bytes"] != size:
            raise OSError(f"{path.name} has {size} bytes, {known[path.name]['bytes']} were written")
        else:
            files[path.name] = known[path.name]
    if lost := sorted(set(known or ()) - set(files)):
        raise OSError(f"{lost[0]} is not in the folder: every process needs the same run.output_dir")
    whole = content | {"files": files}
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps(whole | {_SEAL: _digest(whole)}, indent=1) + "\n", encoding="utf-8")
    flush_to_disk(manifest)
    flush_to_disk(folder)


def _digest(manifest: dict[str, Any]) -> str:
    """SHA-256 of a manifest's contents, independent of formatting."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_manifest(folder: Path, *, deep: bool = True, share: Share = (0, 1), when_read: bool = False) -> dict[str, Any]:
    """The manifest of a valid folder; raises Damaged with the first file that differs.

    ``deep`` reads every byte, unless this process has read these files before and none of them has changed; without
    it only the sizes are compared. ``share``: of the files, this rank reads its part. ``when_read``: not those that
    have checksums of blocks: a ``TensorReader`` validates what it reads.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        seal = manifest.pop(_SEAL, None)
        files = manifest["files"]
    except FileNotFoundError:
        raise Damaged(f"{folder}: no {MANIFEST}: not a checkpoint, or an incomplete one") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{path}: damaged: {error}") from None
    if seal != _digest(manifest):
        raise Damaged(f"{path}: damaged: it does not match its checksum (or an earlier version wrote it)")
    seen: list[Any] = [seal]
    newest = 0.0
    for name, expected in files.items():
        file = folder / name
        if not file.is_file():
            raise Damaged(f"{file}: missing from the checkpoint")
        found = file.stat()
        if found.st_size != expected["bytes"]:
            raise Damaged(f"{file}: damaged: {found.st_size} bytes, expected {expected['bytes']}")
        seen.append((found.st_ino, found.st_size, found.st_ctime_ns))
        newest = max(newest, found.st_ctime)
    if deep:
        key = (folder.resolve(), share, when_read)
        if _hashed.get(key) != tuple(seen):
            settled = newest < time.time() - _SETTLED_S
            _hash(folder, {n: one for n, one in files.items() if not (when_read and "crc32" in one)}, share)
            if settled:
                _hashed[key] = tuple(seen)
    return manifest


def _hash(folder: Path, files: dict[str, Any], share: Share) -> None:
    """Raises Damaged for the first of this rank's files with another content."""
    rank, world = share
    for number, (name, expected) in enumerate(files.items()):
        if number % world == rank and file_sha256(folder / name) != expected["sha256"]:
            raise Damaged(f"{folder / name}: damaged: checksum mismatch")


def read_bytes(folder: Path, name: str, manifest: dict[str, Any]) -> bytes:
    """A file of the checkpoint; raises Damaged if it is not what the manifest says, also where the manifest was
    read without ``deep`` or by several ranks."""
    try:
        content = (folder / name).read_bytes()
    except OSError as error:
        raise Damaged(f"{folder / name}: {error.strerror}") from None
    if hashlib.sha256(content).hexdigest() != manifest["files"][name]["sha256"]:
        raise Damaged(f"{folder / name}: damaged: checksum mismatch")
    return content
