"""All checks in their order; one that breaks is reported and the rest go on."""

from __future__ import annotations

from toolkit.doctor import devices, machine, packages  # noqa: F401  # registering their checks
from toolkit.doctor.model import CHECKS, Condition


def examine() -> list[Condition]:
    """Everything that the doctor can see."""
    found: list[Condition] = []
    for run in CHECKS:
        try:
            found.extend(run())
        except Exception as error:
            found.append(Condition(run.__name__, "warning", f"could not be looked at: {error}"))
    return found
