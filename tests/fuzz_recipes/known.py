"""Differences that are explained and not (yet) gone: each with the recipes that it is about and its reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Known:
    """``reason`` stands in the results beside each recipe that this is about."""

    reason: str
    applies: Callable[[str, dict[str, Any], str, str], bool]
    """(family, recipe, stage, what was said)"""


KNOWN: tuple[Known, ...] = ()


def known_reason(family: str, recipe: dict[str, Any], stage: str, why: str) -> str | None:
    """Why this difference is expected, or None."""
    return next((known.reason for known in KNOWN if known.applies(family, recipe, stage, why)), None)
