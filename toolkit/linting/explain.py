"""`toolkit explain CODE` and `toolkit explain KEY FILE...`."""

from __future__ import annotations

import textwrap
from typing import Any

from toolkit.errors import InputError
from toolkit.linting import evidence, layers
from toolkit.linting.engine import contexts
from toolkit.linting.evidence_table import TABLE
from toolkit.linting.files.load import load
from toolkit.linting.model import Files
from toolkit.linting.near import meant, nearest
from toolkit.linting.registry import all_rules


def code(wanted: str, columns: int = 100) -> tuple[str, dict[str, Any]]:
    """A rule's reason, an example that fails and one that passes, as text and as data."""
    rules = all_rules()
    rule = rules.get(wanted.upper())
    if rule is None:
        near = nearest(wanted.upper(), rules, 0.6)
        hint = meant(near) if near else "; toolkit explain KEY FILE... shows which layer sets a key"
        raise InputError(f"{wanted}: no such code{hint}")
    lines = [f"{rule.code}  {rule.severity}  {rule.title}", ""]
    if rule.reason:
        lines += [*textwrap.wrap(" ".join(rule.reason.split()), columns), ""]
    lines += ["fails:", *_example(rule.fails), "", "passes:", *_example(rule.passes), ""]
    if rule.reader:
        lines += [f"(checked with --reader {rule.reader})", ""]
    checked = evidence.described(rule.code, TABLE.get(rule.code, ()), rule.source)
    lines += textwrap.wrap(f"source: {rule.source}", columns)
    for line in checked:
        lines += textwrap.wrap(line, columns, subsequent_indent="  ")
    lines.append(f"to allow it: # toolkit: allow {rule.code}")
    data = {
        "code": rule.code,
        "severity": rule.severity,
        "title": rule.title,
        "reason": rule.reason,
        "source": rule.source,
        "checked": checked,
        "fails": rule.fails,
        "passes": rule.passes,
    }
    return "\n".join(lines), data


def _example(files: Files) -> list[str]:
    lines = []
    for name, text in files.items():
        lines.append(f"  {name}")
        lines += [f"    │ {line}" for line in text.replace("\ufeff", "<BOM>").rstrip("\n").splitlines()]
    return lines


def key(wanted: str, files: list[str], command: str | None = None, columns: int = 100) -> tuple[str, dict[str, Any]]:
    """Which layer sets a key under each of the three readers, as text and as data."""
    groups = contexts(load(files, command))
    if len(groups) > 1:
        raise InputError("explain KEY takes at most one file of each kind")
    found = layers.answers(groups[0], wanted)
    if found is None:
        raise InputError(f"{wanted}: no layer defines this key{meant(nearest(wanted, layers.names(), 0.7))}")
    lines, data = [wanted], []
    for reader, answer in zip(layers.READERS, found, strict=True):
        value = f"stops: {answer.value}" if answer.fails else _shown(answer.value)
        head = f"  {reader:<18}  {value}"
        lines += textwrap.wrap(head, columns, subsequent_indent=" " * 22)
        lines += textwrap.wrap(f"{answer.where}: {answer.why}" if answer.where else answer.why, columns,
                               initial_indent=" " * 22, subsequent_indent=" " * 22)  # fmt: skip
        data.append(
            {
                "reader": reader,
                "value": answer.value,
                "where": answer.where,
                "why": answer.why,
                "stops": answer.fails,
            }
        )
    return "\n".join(lines), {"key": wanted, "answers": data}


def _shown(value: Any) -> str:
    if value is None:
        return "not read"
    return str(value).lower() if isinstance(value, bool) else str(value)
