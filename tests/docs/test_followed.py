"""Pages that are followed: their blocks of code are written to files and their commands are run, in order."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tiny import recipe_dict

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def run(arguments: list[str], folder: Path, package: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(package), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = ["-m", "toolkit", *arguments[1:]] if arguments[0] == "toolkit" else arguments[1:]
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.group
@pytest.mark.timeout(900)
def test_a_script_of_ones_own_is_proven(tmp_path: Path) -> None:
    text = (ROOT / "docs/tutorials/prove-your-script.md").read_text()
    script = tmp_path / "train.py"
    verdicts = []
    for language, title, body in BLOCK.findall(text):
        if title == "train.py":
            script.write_text(body)
        elif title == "loop.py":
            before, _, _ = script.read_text().partition("\nfor batch in batches(8):\n")
            script.write_text(f"{before}\n{body}")
        elif language == "sh":
            for line in body.splitlines():
                done = run(line.split(), tmp_path)
                if line.startswith("toolkit"):
                    verdicts.append((done.returncode, done.stdout))
                else:
                    assert done.returncode == 0, done.stderr[-2000:]
    (wrong, told), (right, proven) = verdicts
    assert (wrong, right) == (1, 0)
    assert "the loss is averaged per micro-batch, not per supervised token" in told
    assert "equivalent" in proven


@pytest.mark.slow
@pytest.mark.group
@pytest.mark.timeout(900)
def test_the_page_on_adding_a_fault_adds_one(tmp_path: Path, tiny_root: Path) -> None:
    shutil.copytree(ROOT / "toolkit", tmp_path / "package/toolkit", ignore=shutil.ignore_patterns("__pycache__"))
    text = (ROOT / "docs/how-to/add-fault.md").read_text()
    ((_, path, body),) = (block for block in BLOCK.findall(text) if block[0] == "python")
    (tmp_path / "package" / path).write_text(body)
    recipe = recipe_dict(tiny_root, run={"output_dir": "runs/fault"}, strategy={"name": "single"})
    recipe["machine"] = {"device": "cpu", "processes": 1}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    command = next(line for block in BLOCK.findall(text) for line in block[2].splitlines() if "--fault" in line)
    done = run(command.split(), tmp_path, tmp_path / "package")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "different  at schedule" in done.stdout
