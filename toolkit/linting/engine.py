"""Runs the rules on the files, and applies the files' allow comments."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from toolkit.errors import Place
from toolkit.linting.context import LintContext
from toolkit.linting.evidence import doubt, refuted
from toolkit.linting.evidence_table import TABLE
from toolkit.linting.files.load import Loaded, load
from toolkit.linting.files.tree import Source
from toolkit.linting.model import Diagnostic, Finding, Reader, Rule, Severity
from toolkit.linting.registry import all_rules

_ALLOW = re.compile(r"#\s*toolkit:\s*allow(-file)?\s+([A-Z0-9, ]+)")
_ALLOW_JSON = re.compile(r"toolkit:\s*allow\s+([A-Z0-9, ]+)")
# Families that judge what the Trainer makes of its arguments: where it may be another program that reads them, their
# findings are warnings, and nothing is fixed.
_ABOUT_ARGUMENTS = ("TA", "TR", "FA", "XL", "LR", "SV", "AU", "KY103", "DC105")


@dataclass
class Report:
    """The findings in the order of the files, and the sources they are about."""

    findings: list[Finding]
    sources: list[Source]
    apart: bool = False  # from a folder, or several of one kind: what no other file names was checked alone
    texts: dict[str, str] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)  # what is wrong with each file that could not be used

    @property
    def failed(self) -> bool:
        """Whether there is a finding other than notes."""
        return any(finding.severity != "note" for finding in self.findings)


def lint(
    files: Sequence[str],
    *,
    command: str | None = None,
    reader: Reader | None = None,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
) -> Report:
    """Read the files and check them; raises InputError if none can be used."""
    return check(load(list(files), command), reader=reader, select=select, ignore=ignore)


def check(
    loaded: Loaded,
    *,
    reader: Reader | None = None,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
) -> Report:
    """Check sources that are already read."""
    rules = [rule for rule in all_rules().values() if _chosen(rule.code, select, ignore)]
    groups = contexts(loaded, reader)
    findings: dict[tuple[str, str, str, str], Finding] = {}
    for context in groups:
        for rule in rules:
            for diagnostic in rule.check(context):
                finding = _finding(rule, diagnostic, context)
                if finding is not None:
                    findings.setdefault((finding.code, str(finding.place), finding.key, finding.message), finding)
    order = {source.path: index for index, source in enumerate(loaded.sources)}
    ranked = sorted(
        findings.values(),
        key=lambda f: (order.get(str(f.place.file), 0), f.place.line or 0, f.place.column or 0, f.code),
    )
    texts = {source.path: source.text for source in loaded.sources}
    return Report(ranked, loaded.sources, len(groups) > 1, texts, list(dict.fromkeys(loaded.unread)))


def contexts(loaded: Loaded, reader: Reader | None = None) -> list[LintContext]:
    """One context where there is at most one file of each kind; else each file or command with those that it names."""
    kinds = Counter(source.kind for source in loaded.sources)
    if not loaded.apart and all(count == 1 for count in kinds.values()):
        return [LintContext(loaded.sources, reader, loaded.missing)]
    by_path: dict[str, list[Source]] = {}
    for source in loaded.sources:
        by_path.setdefault(source.path, []).append(source)
    named = {name for source in loaded.sources for name in source.names if name != source.path}
    groups: dict[tuple[str, int], list[Source]] = {}
    for source in loaded.sources:
        if source.path not in named:
            groups.setdefault((source.path, source.command), []).append(source)
    for group in groups.values():
        _add_named(group, by_path)
    placed = {id(source) for group in groups.values() for source in group}
    rest = [[source] for source in loaded.sources if id(source) not in placed]
    return [
        LintContext(g, reader, [m for m in loaded.missing if any(m[0].file == s.path for s in g)])
        for g in [*groups.values(), *rest]
    ]


def _add_named(group: list[Source], by_path: dict[str, list[Source]]) -> None:
    """Add the files that the sources of a group name, and those that these name."""
    for source in group:  # grows while it is walked
        for name in source.names:
            found = by_path.get(name, [])
            group += [new for new in found if all(new.kind != old.kind for old in group)]


def _chosen(code: str, select: Iterable[str], ignore: Iterable[str]) -> bool:
    chosen = [prefix.strip().upper() for prefix in select]
    dropped = [prefix.strip().upper() for prefix in ignore]
    if any(code.startswith(prefix) for prefix in dropped if prefix):
        return False
    return not chosen or any(code.startswith(prefix) for prefix in chosen if prefix)


def _finding(rule: Rule, diagnostic: Diagnostic, context: LintContext) -> Finding | None:
    setting = diagnostic.setting
    source = setting.source if setting is not None else diagnostic.source
    if source is None or not source.path:
        return None  # about a file that was not given
    place = setting.place if setting is not None else _head(source)
    width = max(1, setting.entry.end - setting.entry.start) if setting is not None else 1
    key = diagnostic.key or (setting.key if setting is not None else "")
    line = source.line_text(place.line) if place.line else ""
    severity, fix = diagnostic.severity or rule.severity, diagnostic.fix
    if not context.args.certain and rule.code.startswith(_ABOUT_ARGUMENTS):
        severity, fix = _at_most_warning(severity), None
    if _allowed(source, rule.code, place, key):
        return None
    evidence = TABLE.get(rule.code, ())
    if refuted(rule.code, evidence):
        return None
    unconfirmed = doubt(rule.code, evidence)
    if unconfirmed:
        severity, fix = _at_most_warning(severity), None
    reader = source.tool or context.reader
    return Finding(rule.code, severity, place, width, key, diagnostic.message + unconfirmed, fix, line, reader)


def _at_most_warning(severity: Severity) -> Severity:
    return "warning" if severity == "error" else severity


def _head(source: Source) -> Place:
    entries = source.root.entries or {}
    first = min((entry.start for entry in entries.values() if not entry.merged), default=source.root.start)
    return source.place(first)


def _allowed(source: Source, code: str, place: Place, key: str) -> bool:
    if source.syntax == "json":
        return any(code in codes for codes in _json_allowances(source, key))
    for number, line in enumerate(source.text.splitlines(), 1):
        match = _ALLOW.search(line) if "toolkit:" in line else None
        if match and code in _codes(match.group(2)):
            own_line = line.lstrip().startswith("#")
            if match.group(1) or number == place.line or (own_line and number + 1 == place.line):
                return True
    return False


def _json_allowances(source: Source, key: str) -> list[set[str]]:
    """Codes allowed by `"//": "toolkit: allow …"` in the mapping of the key or in one around it."""
    parts, found = key.split(".")[:-1], []
    for depth in range(len(parts) + 1):
        note = source.section(".".join(parts[:depth])).get("//")
        match = _ALLOW_JSON.search(str(note.node.value)) if note is not None else None
        if match:
            found.append(_codes(match.group(1)))
    return found


def _codes(text: str) -> set[str]:
    return {word.strip(",") for word in text.replace(",", " ").split()}
