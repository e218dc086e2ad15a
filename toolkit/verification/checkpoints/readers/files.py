"""Files that torch and safetensors wrote, read without running code from them."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from toolkit.errors import InputError
from toolkit.verification.checkpoints.contents import StoredTensor, Tensors


class Stub:
    """Stands for a class of another package while a file is read: it keeps the arguments and runs nothing."""

    def __new__(cls, *arguments: Any, **_: Any) -> Stub:
        made = super().__new__(cls)
        made.arguments = arguments
        return made

    arguments: tuple[Any, ...] = ()


def load_torch(file: Path, stubs: Sequence[str] = ()) -> Any:
    """What `torch.save` wrote, with tensors mapped from the file where its format allows; ``weights_only`` always.

    ``stubs``: full names of classes that are replaced by ``Stub``. Raises InputError if the file cannot be read, is
    damaged, or needs a class that is neither torch's nor in ``stubs``.
    """
    allowed = [(type(name.rsplit(".", 1)[-1], (Stub,), {}), name) for name in stubs]
    try:
        with file.open("rb") as opened:
            zipped = opened.read(4) == b"PK\x03\x04"
        with torch.serialization.safe_globals(allowed):  # type: ignore[arg-type]
            return torch.load(file, map_location="cpu", weights_only=True, mmap=zipped)
    except OSError as error:
        if error.errno == errno.EINVAL:  # the file ends before its tables do
            raise _refused(file, error, zipped) from None
        raise unreadable(file, error) from None
    except Exception as error:
        raise _refused(file, error, zipped) from None


def _refused(file: Path, error: Exception, zipped: bool) -> InputError:
    """The error for a file that torch cannot read with ``weights_only``."""
    named = re.search(r"GLOBAL ([\w.]+)", str(error))
    if named is None:
        return InputError(f"{file}: cannot be read: truncated, or not written by torch.save; copy or save it again")
    needed = ", ".join((foreign_classes(file) if zipped else [])[:3]) or named.group(1)
    return InputError(
        f"{file}: not loaded: it needs {needed}, and unpickling classes can run code; save its tensors alone"
    )


def foreign_classes(file: Path) -> list[str]:
    """Full names of the classes in a file of `torch.save` that ``weights_only`` refuses; empty if it has none."""
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    except Exception:
        return []


def unreadable(file: Path, error: OSError) -> InputError:
    """The error for a file that the system does not give."""
    cure = {
        errno.EACCES: "make it readable for this user",
        errno.ENOENT: "copy the whole checkpoint",
        errno.EISDIR: "expected a file",
    }.get(error.errno or 0, "check the disk")
    return InputError(f"{file}: {error.strerror or os.strerror(errno.EIO)}; {cure}")


def load_safetensors(file: Path) -> Tensors:
    """Every tensor of a safetensors file by name, each read when asked for. Raises InputError if it is damaged."""
    found = {}
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # not a mapping
                part = opened.get_slice(name)
                dtype = _DTYPES.get(part.get_dtype()) or opened.get_tensor(name).dtype
                found[name] = StoredTensor(tuple(part.get_shape()), dtype, _from_safetensors(file, name))
    except OSError as error:
        raise unreadable(file, error) from None
    except SafetensorError as error:
        raise _damaged(file, error) from None
    return found


_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
           "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool}  # fmt: skip


def _from_safetensors(file: Path, name: str) -> Any:
    def read() -> torch.Tensor:
        try:
            with safe_open(file, framework="pt") as opened:
                tensor: torch.Tensor = opened.get_tensor(name)
                return tensor
        except OSError as error:
            raise unreadable(file, error) from None
        except SafetensorError as error:
            raise _damaged(file, error) from None

    return read


def _damaged(file: Path, error: Exception) -> InputError:
    return InputError(f"{file}: cannot be read: {str(error).splitlines()[0]}; copy or save it again")


def load_json(file: Path) -> dict[str, Any]:
    """A JSON object; raises InputError."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise unreadable(file, error) from None
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise InputError(f"{file}: not a JSON object; copy or save it again")
    return document


def stored(tensors: Any) -> Tensors:
    """The tensors of a mapping by name, tied ones once, under the first name; other values are left out."""
    items = tensors.items() if isinstance(tensors, dict) else ()
    found: Tensors = {}
    seen = set()
    for name, value in items:
        if isinstance(value, torch.Tensor):
            place = (value.data_ptr(), tuple(value.shape), value.dtype)
            if value.numel() == 0 or place not in seen:
                found[str(name)] = StoredTensor.of(value)
            seen.add(place)
    return found
