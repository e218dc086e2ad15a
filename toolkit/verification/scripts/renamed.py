"""Loads the toolkit's modules in a recorded process under a name of their own: the script may have a package called
``toolkit``. Standard library only."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

NAME = "_toolkit_recorder"
_OWN = "toolkit"


def catch(root: str) -> Any:
    """The module ``catch`` of the toolkit in the folder ``root``."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder(root))
    return importlib.import_module(f"{NAME}.verification.scripts.catch")


class Finder:
    """Finds ``_toolkit_recorder.x`` where ``toolkit.x`` of ``root`` is."""

    def __init__(self, root: str) -> None:
        self.root = root

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] != NAME:
            return None
        place = os.path.join(self.root, _OWN, *name.split(".")[1:])
        package = os.path.join(place, "__init__.py")
        if os.path.isfile(package):
            loader = _Loader(name, package)
            return importlib.util.spec_from_file_location(
                name, package, loader=loader, submodule_search_locations=[place]
            )
        file = f"{place}.py"
        if not os.path.isfile(file):
            return None
        return importlib.util.spec_from_file_location(name, file, loader=_Loader(name, file))


class _Loader(SourceFileLoader):
    """Compiles a module whose imports of ``toolkit`` are of the other name. No cache: it has the code of the first."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                node.module = _renamed(node.module)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name == _OWN:
                        alias.asname = alias.asname or _OWN
                    alias.name = _renamed(alias.name)
        code: CodeType = compile(tree, path, "exec", dont_inherit=True)
        return code


def _renamed(name: str) -> str:
    first, *rest = name.split(".")
    return ".".join([NAME, *rest]) if first == _OWN else name
