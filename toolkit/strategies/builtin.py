"""Imports every strategy module beside this one, which registers what it defines."""

from __future__ import annotations

import importlib
import pkgutil

import toolkit.strategies as package

for _module in pkgutil.iter_modules(package.__path__):
    if not _module.ispkg:
        importlib.import_module(f"{package.__name__}.{_module.name}")
