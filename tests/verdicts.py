"""What tests ask of a verification's outcome."""

from __future__ import annotations

from typing import Any

from toolkit.launch.group import WorkerGroup
from toolkit.recipe.resolve import Resolved
from toolkit.verification.faults import fault_class
from toolkit.verification.matrix import what_caught
from toolkit.verification.run import verify


def assert_equivalent(outcome: Any) -> None:
    message = None if outcome.difference is None else outcome.difference[2]
    assert outcome.verdict == "equivalent", (message, outcome.failure, outcome.unproven)


def assert_found(resolved: Resolved, fault: str, group: WorkerGroup, also: str = "") -> None:
    """With this fault the recipe is not equivalent, is caught in one of the fault's stages, and has its diagnosis, or
    ``also``, where nothing tells the two apart."""
    kind = fault_class(fault)
    outcome = verify(resolved, group=group, fault=fault, time_limit=300, round_trip=False, stop_early=True)
    stage, where = what_caught(outcome)
    assert stage in kind.stages, (stage, where)
    assert outcome.diagnosis is not None
    assert outcome.diagnosis.id in (*kind.diagnoses, also)
