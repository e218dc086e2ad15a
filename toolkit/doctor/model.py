"""A finding of the doctor, and the registry of its checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "note", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Condition:
    """The result of one check: what was found and, if there is a problem, what to do."""

    subject: str
    status: Status
    found: str
    advice: str = ""


Check = Callable[[], Iterator[Condition]]
CHECKS: list[Check] = []


def check(function: Check) -> Check:
    """Register a check; they run in the order of the files."""
    CHECKS.append(function)
    return function
