"""Runs all checks in order; a check that fails is reported and the rest continue."""

from __future__ import annotations

from toolkit.doctor import devices, machine, packages  # noqa: F401  # registering their checks
from toolkit.doctor.model import CHECKS, Condition


def examine() -> list[Condition]:
    """Run every check."""
    found: list[Condition] = []
    for run in CHECKS:
        try:
            found.extend(run())
        except Exception as error:
            found.append(Condition(run.__name__, "warning", f"check failed: {error}"))
    return found
