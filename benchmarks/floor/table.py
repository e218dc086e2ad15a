"""Rows of the table, as Markdown and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """One measured ratio.

    ``least``: the goal is a ratio of at least ``goal``, otherwise of at most ``goal``. ``low`` and ``high``: the lowest
    and highest turn of a timed row. A row without ``low`` is a count, and equal in every run. ``value``: the measured
    quantity itself, with its unit, as text.
    """

    part: str
    what: str
    ratio: float
    value: str = ""
    goal: float | None = None
    least: bool = False
    low: float | None = None
    high: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without a goal."""
        if self.goal is None:
            return None
        return self.ratio >= self.goal if self.least else self.ratio <= self.goal


def timed(part: str, what: str, ratios: Sequence[float], value: str = "", **more: Any) -> Row:
    """A row of ``ratios``, one for each turn: both times of a ratio are from the same turn."""
    return Row(part, what, statistics.median(ratios), value, low=min(ratios), high=max(ratios), **more)


def page(rows: Sequence[Row], titles: dict[str, str], head: str) -> str:
    """The table as Markdown, one section for each part. ``titles``: of each part."""
    lines = ["# Distance to the bare loop and to the least possible", "", head]
    for part in dict.fromkeys(row.part for row in rows):
        lines += ["", f"## {titles[part]}", "", "| | measured | ratio | lowest, highest | goal | met |",
                  "| --- | --- | --- | --- | --- | --- |"]  # fmt: skip
        lines += [_line(row) for row in rows if row.part == part]
    return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    spread = "" if row.low is None or row.high is None else f"{row.low:.3f}, {row.high:.3f}"
    goal = "" if row.goal is None else f"{'≥' if row.least else '≤'} {row.goal:g}"
    met = {None: "", True: "yes", False: "no"}[row.met]
    return f"| {row.what} | {row.value} | {row.ratio:.3f} | {spread} | {goal} | {met} |"


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [asdict(row) | {"met": row.met} for row in rows]
