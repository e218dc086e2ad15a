"""``python -m benchmarks.outside MEASUREMENTS.jsonl [-o TABLE.md]``: every exact row of the collection, its memory and
time predicted from what it says about its configuration. Nothing is fitted to the memory of a row. The collection is
not part of this repository."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from benchmarks.outside import commands, times
from benchmarks.outside.accounts import accounts
from benchmarks.outside.allocator import IN_PLAN, fit, fitted_half, interval, shown, swapped
from benchmarks.outside.rows import GIB, Row, held_against


def table(rows: list[Row]) -> list[str]:
    """By source: allocated memory of exact rows, those that ran out of memory, the process."""
    lines: list[str] = []
    for source in dict.fromkeys(row.source for row in rows if not row.left_out):
        own = [row for row in rows if row.source == source and not row.left_out]
        lines += [f"## {source}", "", *_of_source(own), ""]
    return lines


def _of_source(rows: list[Row]) -> list[str]:
    measured = [row for row in rows if row.measured]
    if measured and measured[0].reserved:
        return _reserved(measured)
    lines = [_summary(measured), "", "| row | configuration | measured GiB | predicted GiB | error |"]
    lines += ["| --- | --- | --- | --- | --- |"]
    lines += [f"| {r.id} | {r.what} | {r.measured:.2f} | {r.predicted / GIB:.2f} | {r.error:+.2%} |" for r in measured]
    return [*lines, *_out_of_memory(measured, [row for row in rows if not row.measured])]


def _reserved(measured: list[Row]) -> list[str]:
    """Reserved bytes, and the interval of the plan without context and NCCL."""
    ends = {row.id: interval(row) for row in measured}
    inside = sum(ends[row.id][0] <= row.measured <= ends[row.id][1] for row in measured)
    lines = [
        f"Reserved bytes of {len(measured)} rows; {inside} are inside the interval of the plan.",
        "",
        "| row | configuration | reserved GiB | predicted: allocated GiB | predicted: reserved GiB | inside |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in measured:
        low, high = ends[row.id]
        sizes = f"{row.measured:.2f} | {row.predicted / GIB:.2f} | {low:.1f} to {high:.1f}"
        lines.append(f"| {row.id} | {row.what} | {sizes} | {'yes' if low <= row.measured <= high else 'no'} |")
    return lines


def _summary(measured: list[Row]) -> str:
    errors = [row.error for row in measured]
    within = {share: sum(abs(error) <= share for error in errors) for share in (0.01, 0.1)}
    low = sum(error < -0.05 for error in errors)
    return (
        f"{len(measured)} rows: median error {statistics.median(map(abs, errors)):.2%}, {within[0.01]} within 1%, "
        f"{within[0.1]} within 10%, from {min(errors):+.1%} to {max(errors):+.1%}; {low} more than 5% too low."
    )


def process(rows: Sequence[Row]) -> list[str]:
    """What nvidia-smi shows, and reserved bytes: fitted to one half of the rows that have them, of kernels that a plan
    has, and held against the other, and the halves swapped; then all rows of other kernels."""
    rows = [row for row in rows if not row.left_out and row.exact and row.parts is not None and shown(row)]
    rows, foreign = [row for row in rows if not row.foreign], [row for row in rows if row.foreign]
    if min(sum(fitted_half(row) == side for row in rows) for side in (True, False)) < 20:
        return []
    lines = ["## What nvidia-smi shows, with the allocator's cache", "",
             "| numbers | transient | lesser phase | loss | sharded GiB | measured by predicted |",
             "| --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    halves = {name: [row for row in rows if fitted_half(row) == side] for name, side in
              (("one half", True), ("the other", False))}  # fmt: skip
    for name, one in (
        *((name, fit(half)) for name, half in halves.items()),
        ("all", fit(rows)),
        ("in the plan", IN_PLAN),
    ):
        numbers = f"{one.transient:.3f} | {one.lesser:.2f} | {one.loss:.2f} | {one.sharded / GIB:.2f}"
        lines.append(f"| {name} | {numbers} | {one.low:.3f} to {one.high:.3f} |")
    ends = [(row, *one.interval(row)) for row, one in swapped(rows)]
    assert all(row.parts is not None for row in rows)
    errors = [abs(min(one.expected(row.parts), row.device * GIB) / shown(row) / GIB - 1)  # type: ignore[arg-type]
              for row, one in swapped(rows)]  # fmt: skip
    inside = sum(low <= shown(row) <= high + _DRIVER for row, low, high in ends)
    width = statistics.median(high / low for _, low, high in ends)
    return [
        *lines,
        "",
        f"With the numbers of the half that a row is not of, {inside} of {len(rows)} are inside; the median error of "
        f"the middle is {statistics.median(errors):.1%}, the interval's upper end is {width:.2f} times the lower one "
        f"(median). Outside: {_outside(ends)}.",
        "",
        *_others(foreign),
    ]


def _others(rows: Sequence[Row]) -> list[str]:
    """Rows of kernels that no plan has: how many of them are inside the plan's interval all the same."""
    if not rows:
        return []
    ends = [(row, *interval(row)) for row in rows]
    inside = sum(low <= shown(row) <= high + _DRIVER for row, low, high in ends)
    return [f"Of {len(rows)} rows with kernels that no plan has {inside} are inside the interval of the plan. Outside: "
            f"{_outside(ends)}.", ""]  # fmt: skip


_DRIVER = 0.15
"""GiB that nvidia-smi may show beyond what torch says that the device has."""


def _outside(ends: list[tuple[Row, float, float]]) -> str:
    found = [f"{row.id} ({shown(row):.1f}, {low:.1f} to {high:.1f} GiB)" for row, low, high in ends
             if not low <= shown(row) <= high + _DRIVER]  # fmt: skip
    return ", ".join(found) or "none"


def _out_of_memory(measured: list[Row], failed: list[Row]) -> list[str]:
    """Rows that ran out: of memory for tensors, or within the interval of the process."""
    if not failed:
        return []
    over = sum(row.predicted / GIB >= row.device for row in failed)
    text = f"Out of memory: {over} of {len(failed)} rows are predicted to allocate more than the device has"
    missed = [row for row in failed if row.predicted / GIB < row.device]
    if any(row.parts is not None for row in missed):
        # At its upper end the interval is the device.
        missed = [row for row in missed if row.parts is None or interval(row)[1] < 0.999 * row.device]
        text += f"; {len(failed) - len(missed)} reach it within the interval of the process"
    lines = ["", f"{text}."]
    return lines + [f"Not said: {row.id} ({row.what}: {row.predicted / GIB:.1f} GiB)" for row in missed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurements", type=Path)
    parser.add_argument("--more", type=Path, help="a second collection, whose rows are predicted by commands")
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    rows = [json.loads(line) for line in given.measurements.read_text(encoding="utf-8").splitlines()]

    def show(line: str) -> None:
        print(line, file=sys.stderr)

    more = [] if given.more is None else [json.loads(line) for line in given.more.read_text("utf-8").splitlines()]
    predicted = commands.answered([*rows, *more], show)
    by_command = commands.table([*rows, *more], predicted)
    found = held_against(rows, show)
    seen = [*found, *(one.row() for one in predicted if one.typed.process and not one.first)]
    timed = times.table(rows, predicted, show)
    text = "\n".join([*accounts(rows, found), *table(found), *process(seen), *by_command, *timed]) + "\n"
    sys.stdout.write(text)
    if given.output:
        given.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
