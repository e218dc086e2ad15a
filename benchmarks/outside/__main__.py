"""``python -m benchmarks.outside MEASUREMENTS.jsonl [-o TABLE.md]``: every exact row of the collection, its memory and
time predicted from what it says about its configuration. Nothing is fitted to the memory of a row. The collection is
not part of this repository."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import warnings
from collections import Counter
from pathlib import Path

from benchmarks.outside import times
from benchmarks.outside.allocator import fit, fitted_half
from benchmarks.outside.rows import GIB, Row, held_against


def table(rows: list[Row]) -> list[str]:
    """By source: allocated memory of exact rows, those that ran out of memory, the process; what is left out."""
    lines: list[str] = []
    for source in dict.fromkeys(row.source for row in rows if not row.left_out):
        own = [row for row in rows if row.source == source and not row.left_out]
        lines += [f"## {source}", "", *_of_source(own), ""]
    lines += [
        "## Left out",
        "",
        "| source | left out because | exact rows | out of memory |",
        "| --- | --- | --- | --- |",
    ]
    reasons = Counter((row.source, row.left_out) for row in rows if row.left_out and row.exact)
    failed = Counter((row.source, row.left_out) for row in rows if row.left_out and not row.exact)
    lines += [f"| {s} | {why} | {reasons[s, why]} | {failed[s, why]} |" for s, why in sorted({*reasons, *failed})]
    return lines


def _of_source(rows: list[Row]) -> list[str]:
    told = [row for row in rows if row.measured]
    if told and told[0].reserved:
        return _reserved(told)
    lines = [_summary(told), "", "| row | configuration | measured GiB | predicted GiB | error |"]
    lines += ["| --- | --- | --- | --- | --- |"]
    lines += [f"| {r.id} | {r.what} | {r.measured:.2f} | {r.predicted / GIB:.2f} | {r.error:+.2%} |" for r in told]
    return [*lines, *_process(told), *_out_of_memory(told, [row for row in rows if not row.measured])]


def _reserved(told: list[Row]) -> list[str]:
    """Reserved bytes as a factor of the allocated ones: fitted on one half, told on the other."""
    model = fit(told, lambda row: row.measured)
    other = [row for row in told if not fitted_half(row)]
    ends = {row.id: model.interval(row.predicted / GIB, row.device) for row in told}
    inside = sum(ends[row.id][0] <= row.measured <= ends[row.id][1] for row in other)
    lines = [
        f"Reserved by allocated, fitted on {len(told) - len(other)} rows: {model.middle:.2f}, from {model.low:.2f} to "
        f"{model.high:.2f}. Of the other {len(other)}, {inside} are inside.",
        "",
        "| row | configuration | reserved GiB | predicted: allocated GiB | predicted: reserved GiB | fitted to |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in told:
        low, high = ends[row.id]
        half = "yes" if fitted_half(row) else "no"
        sizes = f"{row.measured:.2f} | {row.predicted / GIB:.2f} | {low:.1f} to {high:.1f}"
        lines.append(f"| {row.id} | {row.what} | {sizes} | {half} |")
    return lines


def _summary(told: list[Row]) -> str:
    errors = [row.error for row in told]
    within = {share: sum(abs(error) <= share for error in errors) for share in (0.01, 0.1)}
    low = sum(error < -0.05 for error in errors)
    return (
        f"{len(told)} rows: median error {statistics.median(map(abs, errors)):.2%}, {within[0.01]} within 1%, "
        f"{within[0.1]} within 10%, from {min(errors):+.1%} to {max(errors):+.1%}; {low} more than 5% too low."
    )


def _process(told: list[Row]) -> list[str]:
    rows = [row for row in told if row.process]
    if sum(map(fitted_half, rows)) < 10:
        return []
    model, other = fit(rows), [row for row in rows if not fitted_half(row)]
    ends = [(row, *model.interval(row.predicted / GIB, row.device)) for row in other]
    inside = sum(low <= row.process <= high for row, low, high in ends)
    return [
        "",
        f"Process (nvidia-smi) by allocated, fitted on {len(rows) - len(other)} rows: {model.middle:.2f}, from "
        f"{model.low:.2f} to {model.high:.2f} for eight of ten. Of the other {len(other)}, {inside} are inside.",
    ]


def _out_of_memory(told: list[Row], failed: list[Row]) -> list[str]:
    if not failed:
        return []
    over = sum(row.predicted / GIB >= row.device for row in failed)
    text = f"Out of memory: {over} of {len(failed)} rows are predicted to allocate more than the device has"
    rows = [row for row in told if row.process]
    if sum(map(fitted_half, rows)) < 10:
        missed = [row for row in failed if row.predicted / GIB < row.device]
        lines = ["", f"{text}."]
    else:
        model = fit(rows)
        missed = [row for row in failed if model.interval(row.predicted / GIB, row.device)[1] < row.device]
        reach = len(failed) - len(missed)
        lines = ["", f"{text}; {reach} reach it within the interval of the process."]
    return lines + [f"Not said: {row.id} ({row.what}: {row.predicted / GIB:.1f} GiB)" for row in missed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurements", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    rows = [json.loads(line) for line in given.measurements.read_text(encoding="utf-8").splitlines()]

    def show(told: str) -> None:
        print(told, file=sys.stderr)

    text = "\n".join([*table(held_against(rows, show)), "", *times.table(rows, show)]) + "\n"
    sys.stdout.write(text)
    if given.output:
        given.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
