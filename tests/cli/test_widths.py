"""What commands print fits terminals of 80 columns, has colour on a terminal alone, and says what is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from toolkit.cli import app
from toolkit.linting import engine
from toolkit.linting.explain import code, key
from toolkit.linting.files.load import load
from toolkit.linting.output import text
from toolkit.linting.registry import all_rules
from toolkit.verification import command as verify_command
from toolkit.verification.compare.measure import STAGES, Stage
from toolkit.verification.screen import _cell

ANSI = re.compile(r"\x1b\[[\d;]*m")
YAML = "distributed_type: DEEPSPEED\nmixed_precision: fp16\ndeepspeed_config:\n  deepspeed_config_file: {}\n"
JSON = '{"bf16": {"enabled": true}, "zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto"}\n'


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """By relative names, so that no line's length depends on where the tests run."""
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(YAML.format("d.json"))
    Path("d.json").write_text(JSON)
    return ["a.yaml", "d.json"]


@pytest.mark.parametrize("columns", [80, 100])
def test_findings_fit(columns: int, pair: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    report = engine.check(load(pair))
    assert report.findings
    plain = text.show(report, columns=columns)
    long = [line for line in plain.splitlines() if len(line) > columns and " " in line.strip()[:60]]
    assert not [line for line in long if not any(name in line for name in pair)], long
    coloured = text.show(report, columns=columns, colour=True)
    assert ANSI.sub("", coloured) == plain
    assert "\x1b[31merror" in coloured or "\x1b[33mwarning" in coloured


@pytest.mark.parametrize("columns", [80, 100])
def test_explanations_fit(columns: int, pair: list[str]) -> None:
    for wanted in list(all_rules())[::20]:
        prose = [line for line in code(wanted, columns)[0].splitlines() if not line.startswith("    ")]
        assert all(len(line) <= columns or " " not in line or line.startswith(wanted) for line in prose), wanted
    said = key("zero_optimization.stage", pair, None, columns)[0]
    assert all(len(line) <= columns or pair[0] in line or pair[1] in line for line in said.splitlines())


def test_a_file_that_cannot_be_read_is_said_once(pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path(pair[0]).write_text("distributed_type: MULTI_GPU\nnum_processes: 2\n")
    Path(pair[1]).write_text('{"bf16": ')
    with pytest.raises(SystemExit) as ended:
        app(["lint", *pair, *pair[1:]], prog_name="toolkit")
    out, err = capsys.readouterr()
    assert ended.value.code == 2
    assert err.count("not valid JSON") == 1, err
    assert "clean · " not in out
    assert "1 cannot be read" in out


def test_the_stages_of_a_verdict_fit_80_columns() -> None:
    long = Stage(STAGES[0], summary="x" * 60)
    assert 18 + 2 * len(_cell(long)) < 80


def test_a_verdict_is_coloured_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verify_command._say("equivalent · detects")
    assert capsys.readouterr().out == "equivalent · detects\n"
    monkeypatch.setattr(verify_command, "coloured", lambda out: True)
    verify_command._say("different  at gradient\n" + "word " * 40)
    out = capsys.readouterr().out
    assert out.startswith("\x1b[31mdifferent\x1b[0m  at gradient\n")
    assert max(map(len, ANSI.sub("", out).splitlines())) <= 100
