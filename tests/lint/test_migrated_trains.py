"""Files that were migrated train the same: one Accelerate loop, on two processes, under the old files and the new,
and each run is proven equal to a plain loop by `toolkit verify --trace`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import resolved_from
from tiny import recipe_dict
from toolkit.launch.files import launch_files, write_files

LOOP = Path(__file__).parents[2] / "examples" / "bare_accelerate.py"


def losses(config: Path, folder: Path, *, traced: bool) -> list[float]:
    """What the bare loop prints under ``config``; it says the strategy and its processes, too."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(config),
        str(LOOP),
        *([str(folder / "trace")] if traced else []),
    ]
    done = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "over 2 processes" in done.stdout
    kind = "DEEPSPEED" if "DEEPSPEED" in config.read_text() else "FSDP"
    assert kind in done.stdout, "the strategy must be engaged"
    if traced:
        command = [sys.executable, "-m", "toolkit", "verify", "--trace", str(folder / "trace")]
        proof = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
        assert proof.returncode == 0, proof.stdout + proof.stderr
        assert "equivalent" in proof.stdout
    return [float(value) for value in re.findall(r"loss ([0-9.]+)", done.stdout)]


@pytest.mark.usefixtures("launches")
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("zero3", "fsdp2"),
        ("zero1", "fsdp2"),
        ("zero2", "fsdp2"),
        ("fsdp1", "fsdp2"),
        ("fsdp2", "zero2"),
        ("fsdp2", "zero3"),
    ],
)
def test_migrated_files_train_the_same(old: str, new: str, tiny_root: Path, tmp_path: Path) -> None:
    recipe = recipe_dict(tiny_root, strategy={"name": old}, run={"save_every": 10})
    before = tmp_path / "before"
    paths = write_files(launch_files(resolved_from(recipe), before, "recipe.yaml"), before)
    given = [str(p) for p in paths if p.name in ("accelerate.yaml", "deepspeed.json", "training_args.json")]
    command = [sys.executable, "-m", "toolkit", "migrate", *given, "--to", new, "-o", str(tmp_path / "after")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    # The recorder reads no flat parameters.
    first = losses(before / "accelerate.yaml", before, traced=old != "fsdp1")
    second = losses(next((tmp_path / "after").glob("accelerate*.yaml")), tmp_path / "after", traced=True)
    assert len(first) == 5
    assert first[0] > first[-1] * 0.9  # it runs at all; equality is what counts
    assert second == pytest.approx(first, rel=1e-5)
