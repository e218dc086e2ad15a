"""Nested arguments of a model as plain values: JSON beside a list of tensors, so that no trace needs a pickle."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from toolkit.errors import InputError

Copy = Callable[[torch.Tensor], torch.Tensor]


class Unrecordable(Exception):
    """A value that has no plain form."""


def flatten(value: Any, copy: Copy = torch.Tensor.detach) -> tuple[str, list[torch.Tensor]]:
    """JSON with ``{"tensor": 3}`` in the places of tensors, and the tensors, each as ``copy`` gives it.

    Raises Unrecordable for anything but tensors, numbers, texts, None, dtypes, devices, lists, tuples and mappings.
    """
    tensors: list[torch.Tensor] = []

    def plain(item: Any, place: str) -> Any:
        if item is None or type(item) in (bool, int, str):
            return {"is": item}
        if type(item) is float:
            return {"float": repr(item)}
        if isinstance(item, torch.Tensor):
            tensors.append(copy(item))
            return {"tensor": len(tensors) - 1}
        if isinstance(item, torch.dtype):
            return {"dtype": str(item).removeprefix("torch.")}
        if isinstance(item, torch.device):
            return {"is": item.type}
        if isinstance(item, Mapping):
            return {"map": [[key, plain(one, f"{place}.{key}")] for key, one in item.items() if _key(key, place)]}
        if isinstance(item, list | tuple):
            kind = "list" if isinstance(item, list) else "tuple"
            return {kind: [plain(one, f"{place}[{at}]") for at, one in enumerate(item)]}
        if hasattr(item, "item") and getattr(item, "shape", None) == ():  # NumPy's numbers
            return plain(item.item(), place)
        raise Unrecordable(f"{place.lstrip('.')} is a {type(item).__name__}")

    return json.dumps(plain(value, "")), tensors


def _key(key: Any, place: str) -> bool:
    if type(key) not in (str, int):
        raise Unrecordable(f"{place.lstrip('.')} has a key of class {type(key).__name__}")
    return True


def unflatten(text: str, tensors: list[torch.Tensor], source: str) -> Any:
    """What ``flatten`` was given, tensors as they are here. Raises InputError where ``text`` is not of its form."""

    def value(item: Any) -> Any:
        ((kind, inner),) = item.items()
        match kind:
            case "is":
                return inner
            case "float":
                return float(inner)
            case "tensor":
                return tensors[inner]
            case "dtype":
                return {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[inner]
            case "map":
                return {key: value(one) for key, one in inner}
            case "list":
                return [value(one) for one in inner]
            case "tuple":
                return tuple(value(one) for one in inner)
        raise ValueError(kind)

    try:
        return value(json.loads(text))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        raise InputError(f"--trace: {source}: the inputs of a call cannot be read; record it again") from None


def named_tensors(value: Any, place: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a model's answer by their place in it: ``logits``, ``hidden_states.2``; ``output`` for a bare
    one."""
    if isinstance(value, torch.Tensor):
        yield place or "output", value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from named_tensors(one, f"{place}.{key}".lstrip("."))
    elif isinstance(value, list | tuple):
        for at, one in enumerate(value):
            yield from named_tensors(one, f"{place}.{at}".lstrip("."))
    elif is_dataclass(value) and not isinstance(value, type):
        for one in fields(value):
            yield from named_tensors(getattr(value, one.name), f"{place}.{one.name}".lstrip("."))
