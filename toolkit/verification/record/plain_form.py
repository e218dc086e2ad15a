"""Dataclasses as plain dicts, lists and tensors on disk: read without unpickling, so that no file can run code."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

from toolkit.errors import InputError
from toolkit.verification.record.spill import Spill, is_place, read

SCHEMA = "toolkit.trace/2"
"""1 were pickled objects."""

_LEAVES = (str, int, float, bool, torch.Tensor)
Kind = TypeVar("Kind")


def save_plain(value: Any, file: Path, spill: Spill | None = None) -> None:
    """Write a dataclass, with all that is in it, as ``load_plain`` reads it. Of tensors in ``spill`` it has the places
    alone."""
    torch.save({"schema": SCHEMA, "content": to_plain(value, spill)}, file)


def load_plain(file: Path, kind: type[Kind], spilled: Path | None = None) -> Kind:
    """What ``save_plain`` wrote, tensors on the CPU. Nothing in the file can run code: torch reads tensors and plain
    values only (``weights_only=True``), and every value's type is checked against ``kind``. ``spilled``: the file of a
    ``Spill``, from which its tensors are mapped.

    Raises InputError where the file is missing, or holds anything else.
    """
    try:
        found = torch.load(file, weights_only=True, map_location="cpu")
    except FileNotFoundError:
        raise InputError(f"{file}: missing from the trace; record it again") from None
    except Exception as error:  # bytes of any origin fail in many ways; all of them mean that it is not a trace
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(_refusal(file, reason)) from None
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise InputError(_refusal(file, f"it does not say {SCHEMA}"))
    try:
        return from_plain(_mapped(found.get("content"), spilled), kind)
    except (TypeError, ValueError) as error:
        raise InputError(f"{file}: not a trace of this toolkit version ({error}): record the loop again") from None


def _refusal(file: Path, reason: str) -> str:
    return (
        f"{file}: not a trace of this toolkit version ({reason}). Earlier versions "
        "wrote pickles, which can run code when they are opened: record the loop again"
    )


def _mapped(value: Any, spilled: Path | None) -> Any:
    """``value`` with tensors in the places of those that are in the file ``spilled``."""
    if spilled is None:
        return value
    if is_place(value):
        return read(spilled, value)
    if isinstance(value, dict):
        return {key: _mapped(item, spilled) for key, item in value.items()}
    return [_mapped(item, spilled) for item in value] if isinstance(value, list) else value


def to_plain(value: Any, spill: Spill | None = None) -> Any:
    """``value`` without classes of our own; raises TypeError for what has no plain form."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name), spill) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item, spill) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item, spill) for item in value]
    if isinstance(value, torch.Tensor):
        place = None if spill is None else spill.place(value)
        return value.detach() if place is None else place
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)  # NumPy's are of these classes too
    raise TypeError(f"{type(value).__name__} has no plain form")


def from_plain(value: Any, kind: Any) -> Any:
    """``value`` as the type hint ``kind`` has it; raises TypeError for anything else."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in inner:
            return None
        (kind,) = (one for one in inner if one is not type(None))
        return from_plain(value, kind)
    if is_dataclass(kind):
        known = get_type_hints(kind)
        if not isinstance(value, dict) or value.keys() != known.keys():
            raise TypeError(f"a {getattr(kind, '__name__', kind)} of other fields")
        return kind(**{name: from_plain(value[name], hint) for name, hint in known.items()})  # type: ignore[operator]
    if origin is dict and isinstance(value, dict):
        return {_leaf(key, str): from_plain(item, inner[1]) for key, item in value.items()}
    if origin is list and isinstance(value, list):
        return [from_plain(item, inner[0]) for item in value]
    if origin is tuple and inner[1:] == (...,) and isinstance(value, list):
        return tuple(from_plain(item, inner[0]) for item in value)
    if origin is tuple and isinstance(value, list) and len(value) == len(inner):
        return tuple(from_plain(item, hint) for item, hint in zip(value, inner, strict=True))
    return _leaf(value, kind)


def _leaf(value: Any, kind: Any) -> Any:
    if kind is float and type(value) is int:
        return float(value)
    if kind not in _LEAVES or not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{type(value).__name__} in place of {getattr(kind, '__name__', kind)}")
    return value
