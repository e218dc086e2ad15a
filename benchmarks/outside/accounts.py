"""Every row of the collection: predicted, or listed with the reason why not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.outside import times
from benchmarks.outside.rows import Row, why_left_out

INFERRED = "its source does not say"
"""... what the collection lists as inferred."""


def accounts(rows: Sequence[dict[str, Any]], found: Sequence[Row]) -> list[str]:
    """Counts by source, whose sum is all ``rows``, and every row without a prediction of memory with its reason.
    ``found``: what `held_against` made of them."""
    memory = {row.id for row in found if not row.left_out}
    timed = {row["id"] for row in rows if times.has_time(row) and not times.why_not_timed(row)}
    lines = ["## Every row", "", "| source | rows | memory predicted | time alone | left out |",
             "| --- | --- | --- | --- | --- |"]  # fmt: skip
    sources = dict.fromkeys(row["source_repo"] for row in rows)
    for source in sources:
        ids = {row["id"] for row in rows if row["source_repo"] == source}
        lines.append(_counts(source, ids, memory, timed))
    lines.append(_counts("all", {row["id"] for row in rows}, memory, timed))
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["id"] not in memory:
            reasons.setdefault((row["source_repo"], why_no_memory(row)), []).append(row["id"])
    lines += ["", "Rows whose memory is not predicted:", "", "| source | because | rows | which |",
              "| --- | --- | --- | --- |"]  # fmt: skip
    lines += [f"| {source} | {why} | {len(ids)} | {spans(ids)} |" for (source, why), ids in reasons.items()]
    return [*lines, ""]


def why_no_memory(row: dict[str, Any]) -> str:
    """Why no memory is predicted for a row of any quality."""
    if not any(key.startswith("peak_") for key in row) and row["outcome"] != "oom":
        return "no memory was published"
    if row["inferred"] and row["outcome"] != "oom" and row["quality"] != "exact":
        return f"{INFERRED}: {'; '.join(what for what in row['inferred'] if what != 'none')}"
    if "peak_unspecified_gib" in row:
        return "which memory was measured is not said"
    return why_left_out(row) or "its quality is not exact"


def spans(ids: Sequence[str]) -> str:
    """Rows by name; the collection numbers its rows by twos, and of such a run the first and the last are named."""
    runs: list[list[int]] = []
    for number in sorted(int(name[1:]) for name in ids):
        if runs and number - runs[-1][-1] == 2:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"m{run[0]:04d}" + (f" to m{run[-1]:04d}" if run[1:] else "") for run in runs)


def _counts(name: str, ids: set[str], memory: set[str], timed: set[str]) -> str:
    own, alone = ids & memory, (ids & timed) - memory
    return f"| {name} | {len(ids)} | {len(own)} | {len(alone)} | {len(ids) - len(own) - len(alone)} |"
