"""A safetensors file written in the order of its tensors, one after another, with its checksums taken on the way.

The library writes whole files from memory and sorts tensors by name: what one rank reads in turn would lie apart.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import torch

from toolkit.disk import flush_to_disk

BLOCK_BYTES = 1024**2
"""Of a file each block has a checksum of its own, so that a rank validates what it reads and reads nothing else. A
checkpoint of 840 GB has 4.5 MB of them."""
_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
          torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
          torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}  # fmt: skip


def bytes_of(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape) * tensor.element_size()


def header(tensors: Iterable[tuple[str, torch.Tensor]]) -> bytes:
    """The beginning of a file with these tensors (values are not needed) in this order. Of the format's documentation
    this is all. Wider elements should come first: each tensor then begins at a multiple of its element's size."""
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors:
        end = at + bytes_of(tensor)
        content[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def content_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor on the host."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(flat)  # type: ignore[arg-type]


def offsets(header: bytes) -> dict[str, int]:
    """Where in its file each tensor begins, from the file's header without the first 8 bytes, which are its length."""
    found = json.loads(header)
    begin = 8 + len(header)
    return {name: begin + one["data_offsets"][0] for name, one in found.items() if name != "__metadata__"}


class HashingFile:
    """Writes a file and takes its SHA-256 and the CRC-32 of each of its blocks, a block at a time: it is written and
    hashed while it is in the processor's cache."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._whole, self._blocks = hashlib.sha256(), bytearray()
        self._crc = self.bytes = 0

    def write(self, content: bytes | memoryview) -> None:
        view = memoryview(content)
        while view:
            part = view[: BLOCK_BYTES - self.bytes % BLOCK_BYTES]
            self._file.write(part)
            self._whole.update(part)
            self._crc = zlib.crc32(part, self._crc)
            self.bytes += len(part)
            if self.bytes % BLOCK_BYTES == 0:
                self._end_block()
            view = view[len(part) :]

    def _end_block(self) -> None:
        self._blocks += self._crc.to_bytes(4, "little")
        self._crc = 0

    def to_json(self) -> dict[str, Any]:
        """A file's entry in a manifest, when all of it has been written."""
        if self.bytes % BLOCK_BYTES:
            self._end_block()
        blocks = base64.b64encode(self._blocks).decode()
        return {"bytes": self.bytes, "sha256": self._whole.hexdigest(), "block_bytes": BLOCK_BYTES, "crc32": blocks}


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Write and flush a file; returns its entry in a manifest. Needs no memory beside ``tensors``. Raises OSError."""
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    with path.open("wb") as file:
        hashing = HashingFile(file)
        hashing.write(header(ordered))
        for _, tensor in ordered:
            hashing.write(content_of(tensor))
    flush_to_disk(path)
    return hashing.to_json()
