"""Named tensors in a folder of safetensors files of bounded size, with a manifest to validate them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from toolkit.disk import file_sha256, flush_to_disk
from toolkit.errors import InputError

MANIFEST = "manifest.json"
_SEAL = "manifest_sha256"
SHARD_BYTES = 1024**3


class TensorWriter:
    """Collects tensors and writes a file for each GiB: a save never buffers more.

    ``write`` performs the actions, here or in its own thread. Tensors must be the caller's own copies.
    """

    def __init__(self, folder: Path, stem: str, write: Callable[..., None]) -> None:
        self.folder = folder
        self.stem = stem
        self.write = write
        self.index: dict[str, str] = {}
        self._waiting: dict[str, torch.Tensor] = {}
        self._bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self._waiting[name] = tensor.contiguous()
        self._bytes += tensor.numel() * tensor.element_size()
        if self._bytes >= SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        if not self._waiting:
            return
        number = len(set(self.index.values())) + 1
        file = f"{self.stem}-{number:05d}.safetensors"
        self.write(save_file, self._waiting, self.folder / file, {"format": "pt"})
        self.index |= dict.fromkeys(self._waiting, file)
        self._waiting, self._bytes = {}, 0


class TensorReader:
    """Reads single tensors of a folder by its index."""

    def __init__(self, folder: Path, index: dict[str, str]) -> None:
        self.folder = folder
        self.index = index
        self._open: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.index

    def get(self, name: str) -> torch.Tensor:
        file = self.index[name]
        if file not in self._open:
            self._open[file] = safe_open(self.folder / file, framework="pt")
        return self._open[file].get_tensor(name)

    def names(self) -> Iterator[str]:
        return iter(self.index)


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Seal ``folder``: size and SHA-256 of every file in it, flushed to the disk before the manifest is, and the
    manifest's own."""
    files = {}
    for path in sorted(p for p in folder.iterdir() if p.name != MANIFEST):
        flush_to_disk(path)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    whole = content | {"files": files}
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps(whole | {_SEAL: _digest(whole)}, indent=1) + "\n", encoding="utf-8")
    flush_to_disk(manifest)
    flush_to_disk(folder)


def _digest(manifest: dict[str, Any]) -> str:
    """SHA-256 of a manifest's contents, independent of formatting."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_manifest(folder: Path, *, deep: bool = True) -> dict[str, Any]:
    """The manifest of a valid folder; raises InputError with the first file that differs.

    ``deep`` reads every byte; without it only the sizes are compared.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        seal = manifest.pop(_SEAL, None)
        files = manifest["files"]
    except FileNotFoundError:
        raise InputError(f"{folder}: no {MANIFEST}: not a checkpoint, or an incomplete one") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: damaged: {error}") from None
    if seal != _digest(manifest):
        raise InputError(f"{path}: damaged: it does not match its checksum (or an earlier version wrote it)")
    for name, expected in files.items():
        file = folder / name
        if not file.is_file():
            raise InputError(f"{file}: missing from the checkpoint")
        size = file.stat().st_size
        if size != expected["bytes"]:
            raise InputError(f"{file}: damaged: {size} bytes, expected {expected['bytes']}")
        if deep and file_sha256(file) != expected["sha256"]:
            raise InputError(f"{file}: damaged: checksum mismatch")
    return manifest
