"""Every rule: its failing example is found, its passing one is not, and its fix leaves a clean file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lint.folder import put
from toolkit.linting.engine import check
from toolkit.linting.evidence import refuted
from toolkit.linting.evidence_table import TABLE
from toolkit.linting.files.load import load
from toolkit.linting.fix import plan
from toolkit.linting.model import Rule
from toolkit.linting.registry import all_rules

RULES = list(all_rules().values())


@pytest.mark.parametrize("letters", sorted({rule.code[:2] for rule in RULES}))
def test_rules(letters: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests) -> None:
    for rule in RULES:
        if rule.code.startswith(letters):
            with subtests.test(rule.code):
                folder = tmp_path / rule.code
                folder.mkdir()
                monkeypatch.chdir(folder)
                check_rule(rule)


def check_rule(rule: Rule) -> None:
    assert all((rule.title, rule.source, rule.fails, rule.passes)), "a rule explains itself"

    if refuted(rule.code, TABLE.get(rule.code, ())):
        pytest.skip("its fact does not hold in the installed version")
    failing = load(put(rule.fails))
    report = check(failing, reader=rule.reader)
    found = [finding for finding in report.findings if finding.code == rule.code]
    assert found, f"the failing example is not found, only {[f.code for f in report.findings]}"
    for finding in found:
        assert finding.severity in ("error", "warning", "note")
        assert 1 <= finding.place.line <= len(report.texts[str(finding.place.file)].splitlines())
        assert finding.message == finding.message.strip()
    fixed = plan(failing, reader=rule.reader, select=(rule.code,)) if any(f.fix for f in found) else None

    for name in rule.fails:
        Path(name).unlink()
    passing = check(load(put(rule.passes)), reader=rule.reader).findings
    assert [f.message for f in passing if f.code == rule.code] == [], "the passing example is found"
    assert [(f.code, f.message) for f in passing if f.severity == "error"] == [], "the passing example has errors"

    if fixed is not None:
        assert fixed.changed
        assert fixed.report is not None
        assert [f.message for f in fixed.report.findings if f.fix] == [], "the fix leaves something to fix"


def test_there_are_enough_rules() -> None:
    assert len(RULES) >= 80
