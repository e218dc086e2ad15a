"""Pieces of named tensors in safetensors files of bounded size: each rank writes its own, any rank reads any.

``index.json`` says which elements of which tensor are in which file. A piece is stored flat, in the order of its
elements, under the tensor's name where it is all of the tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from toolkit.errors import InputError, RunFailed
from toolkit.strategies.engines.base import on_host
from toolkit.strategies.engines.pieces import Piece, Shape, Values, cut, overlap, whole
from toolkit.training.blocks import BlockReader, Report
from toolkit.training.manifest import Damaged, read_bytes
from toolkit.training.safetensors_file import offsets, write_tensors

INDEX = "index.json"
SCHEMA = "toolkit.checkpoint/2"
EARLIER = "toolkit.checkpoint/1"
"""Whole tensors, written by rank 0; their index is in the manifest."""
FILE_BYTES = 1024**3


@dataclass
class Entry:
    """One tensor: which piece of it is in which file."""

    shape: Shape
    dtype: torch.dtype
    pieces: list[tuple[str, Piece]] = field(default_factory=list)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def to_json(self) -> dict[str, Any]:
        pieces = [[file, *_numbers(piece)] for file, piece in self.pieces]
        return {"shape": list(self.shape), "dtype": str(self.dtype).removeprefix("torch."), "pieces": pieces}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Entry:
        pieces = [(file, _piece(start, size)) for file, start, size in found["pieces"]]
        return cls(tuple(found["shape"]), getattr(torch, found["dtype"]), pieces)


Index = dict[str, Entry]


def _numbers(piece: Piece) -> tuple[Any, Any]:
    """A range as two numbers, a box as two lists."""
    return (piece.start[0], piece.size[0]) if piece.flat else (list(piece.start), list(piece.size))


def _piece(start: Any, size: Any) -> Piece:
    return Piece((start,), (size,)) if isinstance(start, int) else Piece(tuple(start), tuple(size))


def stored_name(name: str, piece: Piece, shape: Shape) -> str:
    """The name of a piece in its file; ``name[start:stop]`` if it is not the whole tensor."""
    if piece == whole(shape):
        return name
    ends = (f"{start}:{start + size}" for start, size in zip(piece.start, piece.size, strict=True))
    return f"{name}[{','.join(ends)}]"


class TensorWriter:
    """Collects the pieces of one rank and writes a file for each GiB: a save never buffers more.

    ``write`` performs the actions, here or in its own thread. ``files``: size and SHA-256 of what is written.
    """

    def __init__(self, folder: Path, stem: str, write: Callable[..., None], files: dict[str, Any]) -> None:
        self.folder, self.stem, self.write, self.files = folder, stem, write, files
        self.index: Index = {}
        self._waiting: dict[str, torch.Tensor] = {}
        self._bytes = self._number = 0

    def add(self, name: str, shape: Shape, values: Values) -> None:
        """This rank's pieces of a tensor, copied to the host one part after another. Raises RunFailed for a piece
        without its values."""
        for piece, tensor in values:
            if tensor.numel() != piece.numel:
                raise RunFailed(
                    f"{name}: {tensor.numel()} elements where {piece.numel} are trained here; nothing was saved"
                )
            entry = self.index.setdefault(name, Entry(shape, tensor.dtype))
            flat, most = tensor.detach().reshape(-1), FILE_BYTES // tensor.element_size()
            for part, at in cut(piece, most):
                self._collect(stored_name(name, part, shape), on_host(flat[at]))
                entry.pieces.append((self._file(), part))

    def _collect(self, name: str, part: torch.Tensor) -> None:
        size = part.numel() * part.element_size()
        if self._bytes + size > FILE_BYTES:
            self.flush()
        self._waiting[name] = part
        self._bytes += size

    def _file(self) -> str:
        return f"{self.stem}-{self._number + 1:05d}.safetensors"

    def flush(self) -> None:
        """Hand over what is collected."""
        if self._waiting:
            self.write(_write, self._waiting, self.folder / self._file(), self.files)
            self._waiting, self._bytes = {}, 0
            self._number += 1


def _write(tensors: dict[str, torch.Tensor], path: Path, files: dict[str, Any]) -> None:
    files[path.name] = write_tensors(path, tensors)


class TensorReader:
    """Reads pieces of a folder's tensors, and of their files no more than the blocks that have these pieces. Files are
    read, not mapped: no page of them stays in memory, and one that shrinks ends in an error instead of a signal."""

    def __init__(
        self, folder: Path, index: Index, files: dict[str, Any] | None = None, report: Report | None = None
    ) -> None:
        """``files``: of the manifest, by which every block is validated that is read; without it none is. ``report``
        gets what is damaged, and the values of that piece are anything; without it Damaged is raised."""
        self.folder = folder
        self.index = index
        self._files, self._report = files or {}, report or _raise
        self._opened: dict[str, tuple[BlockReader, dict[str, int]]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.index

    def get(self, name: str, piece: Piece | None = None) -> torch.Tensor:
        """The elements of a piece in a tensor of its own, flat if it is a range; without ``piece`` the whole tensor.
        Raises Damaged if the checkpoint lacks one of them, or reports it."""
        entry = self.index[name]
        wanted = piece or whole(entry.shape)
        found, count = torch.empty(wanted.numel, dtype=entry.dtype), 0
        for file, there in entry.pieces:
            runs = overlap(wanted, there, entry.shape)
            if (first := next(runs, None)) is not None:
                count += self._read(file, stored_name(name, there, entry.shape), chain([first], runs), found)
        if count != wanted.numel:
            self._report(f"{self.folder}: {name}: {count} of {wanted.numel} elements are in its files")
        return found.view(entry.shape if piece is None else piece.size)

    def _read(self, file: str, name: str, runs: Iterable[tuple[int, int, int]], found: torch.Tensor) -> int:
        """Read runs of a stored piece into ``found``; returns how many elements were there."""
        content, size = memoryview(found.view(torch.uint8).numpy()), found.element_size()  # type: ignore[arg-type]
        reader, begins = self._open(file)
        if name not in begins:
            return 0
        begin = begins[name]
        places = ((begin + place * size, content[at * size : (at + length) * size]) for at, place, length in runs)
        return reader.read(places) // size

    def _open(self, file: str) -> tuple[BlockReader, dict[str, int]]:
        """The reader of a file, and where in it each tensor begins: the library has no call for that."""
        if file not in self._opened:
            reader = BlockReader(self.folder / file, self._files.get(file), self._report)
            self._opened[file] = reader, self._begins(file, reader)
        return self._opened[file]

    def _begins(self, file: str, reader: BlockReader) -> dict[str, int]:
        length = bytearray(8)
        if reader.read([(0, memoryview(length))]) < 8:
            return {}
        header = bytearray(min(int.from_bytes(length, "little"), (self.folder / file).stat().st_size))
        reader.read([(8, memoryview(header))])
        try:
            return offsets(bytes(header))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._report(f"{self.folder / file}: damaged: {error}")
            return {}

    def names(self) -> Iterator[str]:
        return iter(self.index)


def _raise(problem: str) -> None:
    raise Damaged(problem)


def read_index(folder: Path, manifest: dict[str, Any]) -> tuple[Index, Index]:
    """Weights and moments of a checkpoint whose manifest was read; raises InputError."""
    schema = manifest.get("schema")
    if schema == EARLIER:
        return _from_headers(folder, manifest["weights"]), _from_headers(folder, manifest["moments"])
    if schema != SCHEMA:
        raise InputError(f"{folder}: has schema {schema}, this version reads {SCHEMA} and {EARLIER}")
    found = json.loads(read_bytes(folder, INDEX, manifest))
    weights, moments = ({name: Entry.from_json(one) for name, one in found[kind].items()} for kind in found)
    return weights, moments


def _from_headers(folder: Path, files: dict[str, str]) -> Index:
    """The index of whole tensors from the headers of their files."""
    index = {}
    for file in dict.fromkeys(files.values()):
        with safe_open(folder / file, framework="pt") as opened:
            for name in (name for name, place in files.items() if place == file):
                tensor = opened.get_tensor(name)  # mapped, not read
                shape = tuple(tensor.shape)
                index[name] = Entry(shape, tensor.dtype, [(file, whole(shape))])
    return {name: index[name] for name in files}


def incomplete(index: Index, expected: Iterable[tuple[str, Shape]]) -> str | None:
    """The first tensor that is missing or of which elements are missing or written twice; None if there is none."""
    for name, shape in expected:
        entry = index.get(name)
        if entry is None or entry.shape != shape:
            return f"{name}: {'missing' if entry is None else f'shape {entry.shape}'} where {shape} is trained"
        count = sum(piece.numel for _, piece in entry.pieces)
        flat = sorted((piece.start[0], piece.size[0]) for _, piece in entry.pieces if piece.flat)
        apart = any(one[0] + one[1] > other[0] for one, other in pairwise(flat))
        if count != entry.numel or entry.numel == 0 or apart:
            return f"{name}: {count} elements where {entry.numel} are trained" + (", some twice" if apart else "")
    return None
