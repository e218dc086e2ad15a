"""A table in one test: every case runs with what is its own, and what fails is reported by name."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cases import every_case


class Subtests:
    """pytest's, with a list of what failed."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    @contextlib.contextmanager
    def test(self, name: str) -> Iterator[None]:
        try:
            yield
        except AssertionError:
            self.failed.append(name)


def test_every_case_runs_and_each_failure_has_its_name(tmp_path: Path) -> None:
    seen = []

    @every_case(("number", "text"), [(1, "a"), pytest.param(2, "b", id="two"), (1, "a")])
    def test(number: int, text: str) -> None:
        seen.append(number)
        assert text != "a"

    subtests = Subtests()
    test(subtests=subtests, tmp_path=tmp_path)
    assert (seen, subtests.failed) == ([1, 2, 1], ["1-a", "1-a (2)"])


def test_a_case_has_its_own_folder_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "given").write_text("by a fixture")
    folders = []

    @every_case("name", ["a", "b"])
    def test(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folders.append(tmp_path)
        assert Path.cwd() == tmp_path
        assert sorted(os.listdir()) == ["given"]
        assert "CASE" not in os.environ
        monkeypatch.setenv("CASE", name)
        Path("made").touch()

    subtests = Subtests()
    test(subtests=subtests, tmp_path=tmp_path, monkeypatch=monkeypatch)
    assert subtests.failed == []
    assert len(set(folders)) == 2
    assert Path.cwd() == tmp_path


def test_marks_and_empty_tables_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="marks"):
        every_case("number", [pytest.param(1, marks=pytest.mark.nightly)])
    with pytest.raises(AssertionError, match="without a case"):
        every_case("number", [])(lambda number: None)(subtests=Subtests(), tmp_path=tmp_path)
