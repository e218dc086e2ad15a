"""From the ratio and the pattern of a difference to its likely cause. Filled in by causes.py; knows no faults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Diagnosis:
    """``cause`` in a line, ``evidence`` that speaks for it, ``reference``: where upstream it was seen."""

    cause: str
    evidence: str
    reference: str = ""
    remedy: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"cause": self.cause, "evidence": self.evidence, "reference": self.reference or None,
                "remedy": self.remedy or None}  # fmt: skip
