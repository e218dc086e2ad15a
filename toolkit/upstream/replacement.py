"""What is said of each replacement inside another package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Replacement:
    """``what`` is replaced, ``why``, and the versions that it was ``seen`` in. ``absent``: why it is not replaced in
    what is installed, "" if it is."""

    package: str
    what: str
    why: str
    seen: str
    absent: Callable[[], str]
