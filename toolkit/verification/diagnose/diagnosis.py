"""A likely cause, as data: an id of ``known.py`` and the facts that its sentences are written from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from toolkit.verification.diagnose.known import Known, known


@dataclass(frozen=True)
class Diagnosis:
    """``id``: a key of ``known()``. ``facts``: the numbers, names and texts that its templates use.

    Raises KeyError where the id is unknown or a template asks for a fact that is missing.
    """

    id: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _ = self.cause, self.evidence  # a missing fact fails here, not on the screen

    @property
    def known(self) -> Known:
        return known()[self.id]

    @property
    def cause(self) -> str:
        """One line."""
        return self.known.cause.format(**self.facts)

    @property
    def evidence(self) -> str:
        """The observation that the diagnosis follows from."""
        return self.known.evidence.format(**self.facts)

    @property
    def reference(self) -> str:
        """Where the defect was reported: project#number; empty if nowhere."""
        return self.known.reference

    @property
    def remedy(self) -> str:
        """What to set instead; empty if nothing in the recipe changes it."""
        return self.known.remedy

    def to_json(self) -> dict[str, Any]:
        return {"id": self.id, "cause": self.cause, "evidence": self.evidence, "reference": self.reference or None,
                "remedy": self.remedy or None, "facts": dict(self.facts)}  # fmt: skip
