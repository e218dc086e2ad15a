"""What is said of each replacement inside another package, and of each private name that is used."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Replacement:
    """``what`` is replaced or used, ``why``, and the versions that it was ``seen`` in. ``absent``: why it is not in
    what is installed, "" if it is. ``public``: the public way that was tried. ``without``: what the toolkit does."""

    package: str
    what: str
    why: str
    seen: str
    absent: Callable[[], str]
    public: str
    without: str = "it is left as it is"


def named(path: str) -> Any:
    """What ``module:attribute.attribute`` is; None where a part of it is not there."""
    module, _, attributes = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in filter(None, attributes.split(".")):
            found = getattr(found, name)
    except (ImportError, AttributeError):
        return None
    return found


def missing(*paths: str) -> str:
    """The first of these names that is not there, in words; "" if all are."""
    gone = next((path for path in paths if named(path) is None), "")
    return gone and f"{gone.replace(':', '.').rstrip('.')} is not there"


def unwritten(package: str, file: str, *names: str) -> str:
    """The first of these names that is not in a file of an installed package, in words; "" if all are, or there is no
    such package. Read: names of instances are nowhere else, and nothing large is imported for a question."""
    text = source_of(package, file)
    if text is None:
        return ""
    gone = next((name for name in names if name not in text), "")
    return gone and f"{package}/{file} has no {gone}"


def source_of(package: str, file: str) -> str | None:
    """The text of a file of a package, "" where it has none of that name; None where the package is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0], file)
    return path.read_text(encoding="utf-8") if path.is_file() else ""
