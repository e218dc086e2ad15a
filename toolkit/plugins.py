"""Modules that register strategies, layouts, options and optimizers: the toolkit's own, those of installed packages,
and those that a user names.

A package adds them with an entry point of the group ``toolkit.strategies``, ``toolkit.layouts``, ``toolkit.options`` or
``toolkit.optimizers`` whose value is a module. A single file needs no package: ``TOOLKIT_PLUGINS`` holds module names
or paths of Python files, separated by commas. Worker processes and launched ranks inherit the variable, so every rank
knows the same ones.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import pkgutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from toolkit.errors import InputError

GROUPS = ("toolkit.strategies", "toolkit.layouts", "toolkit.options", "toolkit.optimizers")
VARIABLE = "TOOLKIT_PLUGINS"
_OWN = (("toolkit.strategies", ""), ("toolkit.strategies.layouts", ".spec"), ("toolkit.options", ".spec"))
"""Packages of the toolkit's own: each module of them, or of each folder in them the module of that name."""


def load_plugins(*, installed: bool = True) -> None:
    """Import every module that registers something, once. Raises InputError if one cannot be imported.

    ``installed`` False: leave out those of installed packages. To find them takes longer than all else that a command
    does which only writes files.
    """
    _load_own()
    _load_named(os.environ.get(VARIABLE, ""))
    if installed:
        _load_installed()


def named(what: str) -> Any:
    """What ``module:name`` names."""
    module, _, name = what.partition(":")
    return getattr(importlib.import_module(module), name)


@functools.cache
def _load_own() -> None:
    for name, inside in _OWN:
        package = importlib.import_module(name)
        for module in pkgutil.iter_modules(package.__path__):
            if module.ispkg == bool(inside):
                importlib.import_module(f"{name}.{module.name}{inside}")


@functools.cache
def _load_installed() -> None:
    for entry in (one for group in GROUPS for one in metadata.entry_points(group=group)):
        try:
            entry.load()
        except Exception as error:  # whatever the foreign module raises
            raise InputError(
                f"entry point {entry.name} of {entry.group}: {entry.value}: cannot be imported: {error}"
            ) from error


@functools.cache
def _load_named(names: str) -> None:
    for name in filter(None, (part.strip() for part in names.split(","))):
        try:
            _load_file(Path(name)) if name.endswith(".py") else importlib.import_module(name)
        except Exception as error:  # whatever the foreign module raises
            raise InputError(f"{VARIABLE}: {name}: cannot be imported: {error}") from error


def _load_file(path: Path) -> None:
    name = f"toolkit_plugin_{path.stem}"
    if (known := sys.modules.get(name)) is not None:
        if known.__file__ is None or not path.resolve().samefile(known.__file__):
            raise ImportError(f"{known.__file__} has the same file name and is loaded already; rename one of them")
        return
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError("no such file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
