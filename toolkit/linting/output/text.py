"""Findings as text: place, code, message, and the line with the key underlined."""

from __future__ import annotations

import textwrap
from collections import Counter

from toolkit.linting.engine import Report
from toolkit.linting.model import Finding
from toolkit.terminal import paint

_COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}


def show(report: Report, quiet: bool = False, columns: int = 100, colour: bool = False) -> str:
    """The whole report; ends with what to type next. ``quiet`` leaves the source lines out."""
    if not report.findings:
        files = len({source.path for source in report.sources})
        if report.unread:
            lost = len({problem.partition(":")[0] for problem in report.unread})
            return f"{files} file{'s' * (files != 1)} clean, {lost} cannot be read"
        return f"clean · {files} file{'s' * (files != 1)}"
    blocks = [_finding(finding, quiet, columns, colour) for finding in report.findings]
    if report.apart:
        blocks.append(
            "files that no other one names were checked separately; pass one of each kind to check them together"
        )
    return "\n".join([*blocks, _summary(report.findings)])


def _finding(finding: Finding, quiet: bool, columns: int, colour: bool) -> str:
    kind = f"{finding.severity} {finding.code}"
    lines = textwrap.wrap(
        f"{finding.place}  {kind}  {finding.message}", columns, subsequent_indent="     ", break_long_words=False
    )
    lines[0] = lines[0].replace(kind, paint(kind, _COLOURS[finding.severity], colour), 1)
    line, column = finding.line_text, finding.place.column or 1
    if line.strip() and not quiet:
        shown = line.replace("\t", " ")
        number = f"{finding.place.line:>4} │ "
        room = columns - len(number)
        start = max(0, column - 1 - room // 2) if len(shown) > room else 0
        width = max(1, min(finding.width, len(shown) - column + 1))
        lines.append(number + shown[start : start + room])
        lines.append(" " * (len(number) - 2) + "│ " + " " * (column - 1 - start) + "^" * width)
    if finding.fix is not None:
        lines += textwrap.wrap(
            f"     --fix: {finding.fix.title}", columns, subsequent_indent="       ", break_long_words=False
        )
    return "\n".join(lines)


def _summary(findings: list[Finding]) -> str:
    counts = Counter(finding.severity for finding in findings)
    parts = [
        f"{counts[name]} {name}{'s' * (counts[name] != 1)}" for name in ("error", "warning", "note") if counts[name]
    ]
    fixable = sum(finding.fix is not None for finding in findings)
    parts += [f"{fixable} fixable"] if fixable else []
    worst = next(f for name in ("error", "warning", "note") for f in findings if f.severity == name)
    return f"{', '.join(parts)} · toolkit explain {worst.code}"
