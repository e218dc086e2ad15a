"""Every command of docs/recovery.md is run, in its order."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tiny import recipe_dict

PAGE = Path(__file__).parents[2] / "docs" / "recovery.md"


def commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line]


def test_there_are_commands() -> None:
    assert len(commands()) >= 7
    assert all(command.startswith("toolkit ") for command in commands())


@pytest.mark.nightly
@pytest.mark.usefixtures("launches")
@pytest.mark.timeout(900)
def test_every_command_works(tmp_path: Path, tiny_root: Path) -> None:
    import yaml

    run = {"output_dir": "runs/first", "max_steps": 20, "save_every": 2, "eval_every": 2}
    recipe = recipe_dict(tiny_root, strategy={"name": "zero2"}, data={"eval": str(tiny_root / "eval.jsonl")}, run=run)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    for number, command in enumerate(["toolkit train recipe.yaml", *commands()]):
        if number:  # there is always something left to do
            for newest in sorted((tmp_path / "runs/first/checkpoints").glob("step-*"))[-1:]:
                subprocess.run(["rm", "-r", newest], check=True)
        arguments = shlex.split(command)[1:]
        done = subprocess.run(
            [sys.executable, "-m", "toolkit", *arguments],
            cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (command, done.stderr)
        if "--resume" in arguments:
            assert "resumed from" in done.stdout, command
