"""Versions of the installed packages, from their metadata: nothing is imported."""

from __future__ import annotations

import importlib.metadata
import re
from functools import cache


@cache
def installed(package: str) -> str | None:
    """The installed version without what a build adds (2.13.0+cpu); None if the package is not installed."""
    try:
        return importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def installed_before(package: str, version: str) -> str | None:
    """The installed version if it is older than ``version``."""
    here = installed(package)
    return here if here is not None and _parts(here) < _parts(version) else None


def _parts(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)[:3]]
