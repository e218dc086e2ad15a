"""Copies of models whose class transformers cannot build: pickled as the command runs, for `toolkit prove` alone.

A copy is the model's modules and plain attributes, without the values of its parameters and buffers. It is in the
temporary folder of one run of `prove`, which reads it when the command has ended and then deletes it. A recording never
contains one, and `toolkit verify --trace` never reads one: a pickle runs code.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import marshal
import pickle
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn

from toolkit.verification.scripts import renamed
from toolkit.verification.scripts.definitions import definitions
from toolkit.verification.scripts.watch import WRAPPERS

_HOOKS = "_hooks"
"""How the attributes of a module end that hold functions which may change what it computes."""
_PLAIN = (bool, int, float, str, type(None))


def write(model: nn.Module, folder: Path) -> None:
    """Copy ``model`` as it is before anything wraps or splits it. Where that cannot be done, the reason is written."""
    folder.mkdir(parents=True, exist_ok=True)
    main = sys.modules.get("__main__")
    context = {"path": [str(one) for one in sys.path], "main": getattr(main, "__file__", None), "why": ""}
    try:
        with (folder / "model.pickle").open("wb") as file:
            _Writer(file, _held(model)).dump(model)
    except Exception as error:  # whatever a class's own reduce raises
        context["why"] = _line(error)
        (folder / "model.pickle").unlink(missing_ok=True)
    (folder / "context.json").write_text(json.dumps(context), encoding="utf-8")


Plain = dict[str, dict[str, bool | int | float | str | None]]


def plain_attributes(model: nn.Module) -> Plain:
    """By module, its attributes that are plain values."""
    found: Plain = {}
    for name, module in model.named_modules():
        parts = [part for part in name.split(".") if part not in WRAPPERS]
        kept = {key: one for key, one in vars(module).items() if type(one) in _PLAIN and key != "training"}
        found.setdefault(".".join(parts), {}).update(kept)
    return found


def write_changes(model: nn.Module, folder: Path, before: Plain) -> None:
    """Note the attributes that were set after ``write``: a recipe may tell its model how to answer."""
    found = {
        name: {key: values[key] for key, old in before[name].items() if key in values and values[key] != old}
        for name, values in plain_attributes(model).items()
        if name in before
    }
    (folder / "changes.json").write_text(json.dumps({n: v for n, v in found.items() if v}), encoding="utf-8")


def read(folder: Path) -> nn.Module | str:
    """The model, its parameters and buffers zero, or why there is none.

    Runs code of the recorded command: its modules are imported, and of its main file the definitions.
    """
    try:
        context = json.loads((folder / "context.json").read_text(encoding="utf-8"))
        if context["why"]:
            return f"it cannot be copied: {context['why']}"
        with _importing(context["path"]), (folder / "model.pickle").open("rb") as file:
            found: nn.Module = _Reader(file, context["main"]).load()
        for name, values in json.loads((folder / "changes.json").read_text(encoding="utf-8")).items():
            vars(found.get_submodule(name)).update(values)
        return found
    except Exception as error:  # an import may raise anything
        return f"its copy cannot be read: {_line(error)}"


class _Writer(pickle.Pickler):
    """Parameters and buffers as their shapes. Attributes that cannot be pickled are left out, unless they are hooks."""

    def __init__(
        self, file: BinaryIO | io.BytesIO, held: dict[int, tuple[Any, ...]], tried: frozenset[int] = frozenset()
    ) -> None:
        """``tried``: modules of which an attribute is tried now. One that leads back to them is not tried again."""
        super().__init__(file, protocol=4)
        self.held, self.tried = held, tried

    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        if type(value) is _Names:
            return ("names", value.module)
        return self.held.get(id(value)) if isinstance(value, torch.Tensor) else None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType) and "<" in value.__qualname__:
            return _function, _parts(value)
        if not isinstance(value, nn.Module):
            return NotImplemented
        if id(value) in self.tried:
            return _blank, (type(value),)
        state = value.__getstate__()
        if not isinstance(state, dict):
            return NotImplemented
        kept = {}
        for key, one in state.items():
            if key in ("_parameters", "_buffers", "_modules") or self._picklable(one, value):
                kept[key] = one
            elif key.endswith(_HOOKS):
                raise pickle.PicklingError(f"{type(value).__name__} has a hook that cannot be copied")
        return _blank, (type(value),), kept

    def _picklable(self, value: Any, of: nn.Module) -> bool:
        try:
            _Writer(io.BytesIO(), self.held, self.tried | {id(of)}).dump(value)
        except Exception:
            return False
        return True


class _Reader(pickle.Unpickler):
    def __init__(self, file: BinaryIO, main: str | None) -> None:
        super().__init__(file)
        self.main = definitions(Path(main)) if main is not None else {}
        self.made: dict[int, torch.Tensor] = {}

    def persistent_load(self, identity: Any) -> Any:
        if identity[0] == "names":
            return self.main if identity[1] == "__main__" else vars(importlib.import_module(identity[1]))
        number, trains, shape, dtype = identity
        if number not in self.made:  # a tied parameter is one tensor
            value = torch.zeros(shape, dtype=dtype)
            self.made[number] = nn.Parameter(value, requires_grad=False) if trains else value
        return self.made[number]

    def find_class(self, module: str, name: str) -> Any:
        if module != "__main__":
            first, *rest = module.split(".")
            return super().find_class(".".join(["toolkit", *rest]) if first == renamed.NAME else module, name)
        first, *rest = name.split(".")
        if first not in self.main:
            raise AttributeError(f"{first} is not defined at the top of the script")
        found = self.main[first]
        for part in rest:
            found = getattr(found, part)
        return found


def _held(model: nn.Module) -> dict[int, tuple[Any, ...]]:
    """By the id of every parameter and buffer: its number, whether it is a parameter, its whole shape and its dtype."""
    tensors = [(True, one) for one in model.parameters()] + [(False, one) for one in model.buffers()]
    return {
        id(one): (at, parameter, tuple(getattr(one, "ds_shape", one.shape)), one.dtype)
        for at, (parameter, one) in enumerate(tensors)
    }


@dataclass
class _Names:
    """The global names of a function's module."""

    module: str


def _parts(value: types.FunctionType) -> tuple[Any, ...]:
    """Of a lambda or a function that is defined in another: what it is made of. No name leads to it."""
    inner = tuple(cell.cell_contents for cell in value.__closure__ or ())
    code = marshal.dumps(value.__code__)
    return code, _Names(value.__module__), value.__name__, value.__defaults__, value.__kwdefaults__, inner


def _function(code: bytes, names: dict[str, Any], name: str, defaults: Any, by_name: Any, inner: Any) -> Any:
    cells = tuple(types.CellType(one) for one in inner)
    made = types.FunctionType(marshal.loads(code), names, name, defaults, cells)
    made.__kwdefaults__ = by_name
    return made


def _blank(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)


@contextlib.contextmanager
def _importing(path: list[str]) -> Iterator[None]:
    """What the command could import can be imported; what this process has is found first."""
    before = list(sys.path)
    sys.path += [one for one in path if one not in before]
    try:
        yield
    finally:
        sys.path[:] = before


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
