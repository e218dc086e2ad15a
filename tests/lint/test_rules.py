"""Every rule: its failing example is found, its passing one is not, and its fix leaves a clean file."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.linting.engine import check, lint
from toolkit.linting.files.load import load
from toolkit.linting.fix import plan
from toolkit.linting.model import Files, Rule
from toolkit.linting.registry import all_rules

RULES = list(all_rules().values())
by_code = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)


def write(folder: Path, files: Files) -> list[str]:
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return list(files)


@by_code
def test_failing_example_is_found_where_it_stands(rule: Rule, tmp_path: Path) -> None:
    report = lint(write(tmp_path, rule.fails), reader=rule.reader)
    found = [finding for finding in report.findings if finding.code == rule.code]
    assert found, f"found only {[f.code for f in report.findings]}"
    for finding in found:
        assert finding.severity in ("error", "warning", "note")
        assert finding.place.line
        assert finding.place.line <= len(report.texts[str(finding.place.file)].splitlines())
        assert finding.message == finding.message.strip()


@by_code
def test_passing_example_is_not_found(rule: Rule, tmp_path: Path) -> None:
    report = lint(write(tmp_path, rule.passes), reader=rule.reader)
    assert [f.message for f in report.findings if f.code == rule.code] == []


@by_code
def test_passing_example_has_no_error(rule: Rule, tmp_path: Path) -> None:
    report = lint(write(tmp_path, rule.passes), reader=rule.reader)
    errors = [(f.code, f.message) for f in report.findings if f.severity == "error"]
    assert errors == []


@by_code
def test_fix_leaves_nothing_to_find(rule: Rule, tmp_path: Path) -> None:
    loaded = load(write(tmp_path, rule.fails))
    first = check(loaded, reader=rule.reader)
    if not any(f.code == rule.code and f.fix for f in first.findings):
        pytest.skip("no fix that is safe")
    fixed = plan(loaded, reader=rule.reader, select=(rule.code,))
    assert fixed.changed
    assert fixed.report is not None
    assert [f.message for f in fixed.report.findings if f.fix] == []


@by_code
def test_rule_explains_itself(rule: Rule) -> None:
    assert rule.title
    assert rule.source
    assert rule.fails
    assert rule.passes


def test_there_are_enough_rules() -> None:
    assert len(RULES) >= 80
