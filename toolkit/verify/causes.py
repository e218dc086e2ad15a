"""Causes, matched by ratio and pattern."""

from __future__ import annotations

from toolkit.verify.case import Case
from toolkit.verify.diagnosis import Diagnosis
from toolkit.verify.passes import Pass


def diagnose(found: Pass, case: Case) -> Diagnosis | None:
    """The likely cause of what a pass found, or None."""
    return None
