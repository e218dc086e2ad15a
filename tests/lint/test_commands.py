"""What a user types and what comes back: exit codes, formats, speed."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cases import every_case
from tests.lint.app import app
from toolkit.linting.examples import args, ds, fsdp2, zero

run = CliRunner()


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (ds(gradient_cliping=0.5) | zero("zero_stage: 2")).items():
        (tmp_path / name).write_text(text)
    (tmp_path / "clean.yaml").write_text(fsdp2()["accelerate.yaml"])
    (tmp_path / "broken.json").write_text("{")


@every_case(
    ("arguments", "code"),
    [
        (["clean.yaml"], 0),
        (["ds.json"], 1),
        (["broken.json"], 2),
        (["gone.yaml"], 2),
        ([], 2),
        (["--ignore", "DS101", "ds.json"], 0),
        (["--select", "MM", "ds.json"], 0),
        (["--command", "accelerate launch --num_process 4 train.py"], 1),
        (["--command", "echo"], 2),
    ],
)
def test_exit_codes(arguments: list[str], code: int) -> None:
    result = run.invoke(app, ["lint", *arguments])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output


def test_text_names_the_place_and_shows_the_line() -> None:
    lines = run.invoke(app, ["lint", "ds.json"]).output.splitlines()
    assert lines[0].startswith('ds.json:7:3  error DS101  unknown key "gradient_cliping"; did you mean')
    assert any("^" * len('"gradient_cliping"') in line for line in lines)
    assert lines[-1].endswith("toolkit explain DS101")
    assert max(map(len, lines)) <= 100


def test_json_of_the_contract() -> None:
    result = json.loads(run.invoke(app, ["lint", "--json", "-", "ds.json"]).output)
    assert {"schema", "command", "versions", "started", "seconds", "findings", "device", "recipe_sha256"} <= set(result)
    finding = result["findings"][0]
    assert {"code", "severity", "file", "line", "key", "message", "fix"} <= set(finding)
    assert finding["code"] == "DS101"
    assert finding["line"] == 7


def test_sarif_and_github() -> None:
    sarif = json.loads(run.invoke(app, ["lint", "--format", "sarif", "ds.json"]).output)
    assert sarif["version"] == "2.1.0"
    assert sarif["runs"][0]["results"][0]["locations"][0]["physicalLocation"]["region"]["startLine"] == 7
    github = run.invoke(app, ["lint", "--format", "github", "ds.json"]).output
    assert github.startswith("::error file=ds.json,line=7,col=3,title=DS101::")


def test_explain_a_code() -> None:
    result = run.invoke(app, ["explain", "DS101"])
    assert result.exit_code == 0
    assert "fails:" in result.output
    assert "passes:" in result.output
    assert run.invoke(app, ["explain", "XX999"]).exit_code == 2


def test_explain_a_key() -> None:
    Path("args.json").write_text(args(bf16=False)["args.json"])
    result = run.invoke(app, ["explain", "mixed_precision", "accelerate.yaml", "args.json"])
    assert result.exit_code == 0
    assert "accelerate launch" in result.output


@pytest.mark.usefixtures("launches")
def test_three_files_cost_little_more_than_the_libraries_that_read_them() -> None:
    Path("args.json").write_text(args(bf16=True, gradient_accumulation_steps=4)["args.json"])
    code = (
        "import sys, runpy; sys.argv = ['lint', 'accelerate.yaml', 'ds.json', 'args.json']\n"
        "try: runpy.run_module('toolkit.linting', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'accelerate', 'deepspeed', 'peft'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    # The same without our part: typer itself imports pydantic when it runs a command (typer 0.29.2), half of the time.
    bare = (
        "import pathlib, sys, typer, yaml, rich.text\n"
        "def main(files: list[pathlib.Path]) -> None: pass\n"
        "sys.argv = ['lint', 'accelerate.yaml', 'ds.json', 'args.json']\n"
        "try: typer.run(main)\n"
        "except SystemExit: pass"
    )
    # Measured 1.1 to 1.8. Torch alone takes five times as long as the bare command.
    pairs = [(seconds_of(code), seconds_of(bare)) for _ in range(2)]
    ours, libraries = (min(seconds) for seconds in zip(*pairs, strict=True))
    assert ours < 3 * libraries, pairs


def seconds_of(program: str) -> float:
    """Processor seconds of a Python process: other work on the machine counts less than with a clock."""
    repository = Path(__file__).resolve().parents[2]
    env = {**os.environ, "PYTHONPATH": str(repository)}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", program], check=True, env=env, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
