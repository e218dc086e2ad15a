"""Pages that are followed: their blocks of code are written to files and their commands are run, in order."""

from __future__ import annotations

import os
import re
import shlex
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


@pytest.mark.nightly
@pytest.mark.usefixtures("launches")
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
    (wrong, message), (right, proven) = verdicts
    assert (wrong, right) == (1, 0)
    assert "the loss is averaged per micro-batch, not per supervised token" in message
    assert "equivalent" in proven


@pytest.mark.nightly
@pytest.mark.usefixtures("launches")
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


def follow(page: Path, folder: Path, commands: tuple[str, ...]) -> str:
    """Write the recipe of a page, run those of its commands, and check each one's exit status; what they print.

    A command is expected to succeed, unless the comment after it says «exit status N».
    """
    printed = []
    for language, title, body in BLOCK.findall(page.read_text()):
        if title == "recipe.yaml":
            (folder / title).write_text(body)
        for line in body.splitlines() if language == "sh" else ():
            words = shlex.split(line, comments=True)
            if words[:1] == ["toolkit"] and words[1] in commands:
                expected = re.search(r"# exit status (\d)", line)
                done = run(words, folder)
                assert done.returncode == (int(expected.group(1)) if expected else 0), line + done.stdout + done.stderr
                printed += [done.stdout, done.stderr]
    return "\n".join(printed)


FAMILY = ROOT / "docs/how-to/add-model-family.md"


def quoted(number: int) -> str:
    """A block of text of the page, with single spaces."""
    return " ".join(
        [body for language, _, body in BLOCK.findall(FAMILY.read_text()) if language == "text"][number].split()
    )


@pytest.mark.usefixtures("launches")
def test_a_new_family_shows_its_block_and_is_refused_with_a_reason(tmp_path: Path) -> None:
    printed = " ".join(follow(FAMILY, tmp_path, ("config",)).split())
    assert quoted(0) in printed
    assert quoted(1) in printed
    assert quoted(3) in printed


@pytest.mark.nightly
@pytest.mark.usefixtures("launches")
@pytest.mark.timeout(1200)
def test_the_page_on_adding_a_family_verifies_one(tmp_path: Path) -> None:
    printed = follow(FAMILY, tmp_path, ("verify", "plan"))
    assert quoted(2) in " ".join(printed.split())
    assert printed.count("\nequivalent") == 3
    assert "blocks recomputed 2 blocks" in printed
    assert "tensors that train 16" in printed
    assert "plan  gpt_oss" in printed
