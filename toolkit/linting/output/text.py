"""Findings as text: place, code, message, and the line with the key underlined."""

from __future__ import annotations

import textwrap
from collections import Counter

from toolkit.linting.engine import Report
from toolkit.linting.model import Finding

_WIDTH = 100


def show(report: Report, quiet: bool = False) -> str:
    """The whole report; ends with what to type next. ``quiet`` leaves the source lines out."""
    if not report.findings:
        files = len({source.path for source in report.sources})
        if report.unread:
            lost = len({problem.partition(":")[0] for problem in report.unread})
            return f"{files} file{'s' * (files != 1)} clean, {lost} cannot be read"
        return f"clean · {files} file{'s' * (files != 1)}"
    blocks = [_finding(finding, quiet) for finding in report.findings]
    if report.apart:
        blocks.append(
            "files that no other one names were checked separately; pass one of each kind to check them together"
        )
    return "\n".join([*blocks, _summary(report.findings)])


def _finding(finding: Finding, quiet: bool) -> str:
    head = f"{finding.place}  {finding.severity} {finding.code}  "
    lines = textwrap.wrap(head + finding.message, _WIDTH, subsequent_indent="     ", break_long_words=False)
    line, column = finding.line_text, finding.place.column or 1
    if line.strip() and not quiet:
        shown = line.replace("\t", " ")
        number = f"{finding.place.line:>4} │ "
        room = _WIDTH - len(number)
        start = max(0, column - 1 - room // 2) if len(shown) > room else 0
        width = max(1, min(finding.width, len(shown) - column + 1))
        lines.append(number + shown[start : start + room])
        lines.append(" " * (len(number) - 2) + "│ " + " " * (column - 1 - start) + "^" * width)
    if finding.fix is not None:
        lines.append(f"     --fix: {finding.fix.title}")
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
