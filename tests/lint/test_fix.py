"""Fixes keep the rest of the file, are whole or not at all, and nothing is written without being asked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.lint.app import app
from toolkit.linting.examples import args, zero
from toolkit.linting.fix import write_whole

YAML = """# my run
distributed_type: FSDP   # sharded
mixed_precision: no
fsdp_config:
    # wrapping
    fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
    fsdp_version: 2
    fsdp_use_orig_params: true  # from an old file
    fsdp_cpu_offload: false
num_proceses: 2
"""
FIXED = """# my run
distributed_type: FSDP   # sharded
mixed_precision: 'no'
fsdp_config:
    # wrapping
    fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
    fsdp_version: 2
    fsdp_offload_params: false
    fsdp_state_dict_type: SHARDED_STATE_DICT
num_processes: 2
"""
run = CliRunner()


def test_fix_in_place_keeps_comments_and_order(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(YAML)
    file.chmod(0o640)
    result = run.invoke(app, ["lint", "--fix", str(file)])
    assert file.read_text() == FIXED
    assert file.stat().st_mode & 0o777 == 0o640
    assert result.exit_code == 0, result.output
    assert list(tmp_path.iterdir()) == [file]
    assert run.invoke(app, ["lint", "--fix", str(file)]).exit_code == 0
    assert file.read_text() == FIXED


def test_diff_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(YAML)
    result = run.invoke(app, ["lint", "--diff", str(file)])
    assert "-num_proceses: 2" in result.output
    assert "+num_processes: 2" in result.output
    assert file.read_text() == YAML


def test_fix_of_json_on_one_line(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"train_batch_size": 8, "gradient_cliping": 0.5, "zero_optimization": {"stage": 3}}')
    run.invoke(app, ["lint", "--fix", str(file)])
    assert file.read_text() == (
        '{"train_batch_size": 8, "gradient_clipping": 0.5, '
        '"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": true}}'
    )


def test_fix_follows_a_symlink(tmp_path: Path) -> None:
    real, link = tmp_path / "real.yaml", tmp_path / "link.yaml"
    real.write_text(YAML)
    link.symlink_to(real)
    run.invoke(app, ["lint", "--fix", str(link)])
    assert link.is_symlink()
    assert real.read_text() == FIXED


def test_fix_across_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = zero("zero_stage: 2", "gradient_accumulation_steps: 1") | args(gradient_accumulation_steps=4, bf16=True)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert run.invoke(app, ["lint", *files]).exit_code == 1
    assert run.invoke(app, ["lint", "--fix", *files]).exit_code == 0
    assert "gradient_accumulation_steps: 4" in (tmp_path / "accelerate.yaml").read_text()


@pytest.mark.usefixtures("launches")
def test_killed_while_writing(tmp_path: Path) -> None:
    """Whatever the moment of the kill, the file is the old one or the new one."""
    file = tmp_path / "a.yaml"
    old, new = "a" * 200_000, "b" * 200_000
    write_whole(file, old)
    code = (
        "import sys; from toolkit.linting.fix import write_whole\n"
        "print('go', flush=True)\n"
        "while True: write_whole(sys.argv[1], 'b' * 200000); write_whole(sys.argv[1], 'a' * 200000)"
    )
    for delay in (0.0, 0.007, 0.019):
        child = subprocess.Popen([sys.executable, "-c", code, str(file)], stdout=subprocess.PIPE, cwd=os.getcwd())
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(delay)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        assert file.read_text() in (old, new)


@pytest.mark.parametrize("place", ["  # toolkit: allow FS403", ""])
def test_allowing_one_finding(place: str, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    text = FIXED.replace("    fsdp_state_dict_type: SHARDED_STATE_DICT\n", "")
    file.write_text(text.replace("fsdp_config:", f"fsdp_config:{place}"))
    assert run.invoke(app, ["lint", str(file)]).exit_code == (0 if place else 1)


def test_allowing_in_json(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"//": "toolkit: allow DS101", "gradient_cliping": 0.5, "train_batch_size": 8}')
    assert run.invoke(app, ["lint", str(file)]).exit_code == 0
