"""What became of one key of the source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from toolkit.errors import Place

Outcome = Literal["carried", "no-effect", "differs", "unsupported", "unknown"]
"""``carried``: in the recipe, with the same meaning. ``no-effect``: does not change what is trained. ``differs``: the
recipe does, or may do, something else. ``unsupported``: the recipe has no such thing. ``unknown``: the tables do not
have the key."""
LOST = ("differs", "unsupported", "unknown")


@dataclass(frozen=True)
class Key:
    """One key. ``place`` is None for a default of the tool, which no file has."""

    key: str
    value: Any
    outcome: Outcome
    place: Place | None = None
    recipe: tuple[str, ...] = ()
    reason: str = ""

    @property
    def lost(self) -> bool:
        """Whether the recipe does not train the same because of this key."""
        return self.outcome in LOST

    def line(self) -> str:
        """The key in one line, for the screen and for comments of the recipe."""
        where = f"{self.place.file}:{self.place.line}" if self.place else "default"
        return f"{where}: {self.key}: {self.reason}"

    def to_json(self) -> dict[str, Any]:
        """The key as `toolkit import --json` writes it."""
        return {
            "file": str(self.place.file) if self.place else None,
            "line": self.place.line if self.place else None,
            "key": self.key,
            "value": self.value,
            "outcome": self.outcome,
            "recipe": list(self.recipe),
            "reason": self.reason,
        }
