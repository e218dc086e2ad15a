"""The Trainer script runs under the generated files, its strategy engaged, and trains the same under two of them.

The bare Accelerate script is run by tests/lint/test_migrated_trains.py, under old files and new.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import resolved_from
from tiny import recipe_dict
from toolkit.launch.files import launch_files, write_files

SCRIPT = Path(__file__).parents[2] / "examples" / "hf_trainer.py"


def trainer_losses(strategy: str, root: Path, folder: Path) -> list[float]:
    recipe = recipe_dict(root, strategy={"name": strategy}, run={"output_dir": str(folder / "run")})
    write_files(launch_files(resolved_from(recipe), folder, "recipe.yaml"), folder)
    launch = [sys.executable, "-W", "ignore", "-m", "accelerate.commands.launch", "--config_file", "accelerate.yaml"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, str(SCRIPT), "training_args.json"],
        cwd=folder, capture_output=True, text=True, timeout=150, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    engaged = {"zero2": "DEEPSPEED", "fsdp2": "FSDP"}[strategy]
    assert f"{engaged} over 2 processes" in done.stdout
    line = next(line for line in done.stdout.splitlines() if line.startswith("losses"))
    return ast.literal_eval(line.removeprefix("losses "))


@pytest.mark.usefixtures("launches")
@pytest.mark.nightly
def test_the_trainer_trains_the_same_under_zero2_and_fsdp2(tiny_root: Path, tmp_path: Path) -> None:
    zero, fsdp = (trainer_losses(name, tiny_root, tmp_path / name) for name in ("zero2", "fsdp2"))
    assert len(zero) == 4
    assert zero == pytest.approx(fsdp, abs=2e-4)  # the Trainer's log is rounded to four digits
