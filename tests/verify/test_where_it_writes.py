"""`toolkit verify` writes where the user says, and nowhere into a folder that is not its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tiny import recipe_dict
from toolkit.cli import app
from toolkit.errors import InputError
from toolkit.verification import matrix
from toolkit.verification.command import run_matrix
from toolkit.verification.commands import VerifyRequest
from toolkit.verification.matrix import Cell

CELL = Cell(
    "dropout-redrawn", "ddp", True, True, True, "gradient", "step 1: a weight", "dropout-mask-redrawn",
    "dropout is drawn again", 1.0,
)  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, tiny_root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, with a recipe; no fault is really run."""
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe_dict(tiny_root)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(matrix, "kill_matrix", lambda *given: [CELL])
    return tmp_path


def test_the_kill_matrix_is_printed_and_nothing_written(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_matrix("r.yaml", VerifyRequest(time_limit=1.0)) == 0
    assert "1 of 1 killed, 1 with the right diagnosis" in capsys.readouterr().out
    assert [path.name for path in here.iterdir()] == ["r.yaml"]


@pytest.mark.parametrize("only", [None, "dropout-redrawn"])
def test_it_is_written_where_the_user_says(only: str | None, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_matrix("r.yaml", VerifyRequest(fault=only, time_limit=1.0, output="reports/matrix.md")) == 0
    assert "wrote reports/matrix.md" in capsys.readouterr().out
    assert "| dropout-redrawn | " in (here / "reports/matrix.md").read_text()


def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(matrix, "kill_matrix", lambda *given: ran.append(given) or [CELL])
    with pytest.raises(InputError, match=r"--output: r\.yaml/matrix\.md: r\.yaml is not a folder"):
        run_matrix("r.yaml", VerifyRequest(time_limit=1.0, output="r.yaml/matrix.md"))
    (here / "taken").mkdir()
    with pytest.raises(InputError, match="--output: taken: Is a directory"):
        run_matrix("r.yaml", VerifyRequest(time_limit=1.0, output="taken"))
    assert not ran


def test_a_trace_has_no_report(here: Path) -> None:
    error = CliRunner().invoke(app, ["verify", "--trace", ".", "-o", "page.html"]).exception
    assert isinstance(error, InputError)
    assert "--output: not available with --trace" in str(error)
