"""Ranks of a command are forks of a process that has imported the packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from signalled import write_recipe

NO_ROOM = """
import sys
from toolkit.launch.forks import begin_imports
from toolkit.launch.group import WorkerGroup
from toolkit.recipe.load import recipe_from
begin_imports(recipe_from(sys.argv[1], []))
print(WorkerGroup.start_method)
"""
CODE = """
import os, sys
from toolkit.launch.forks import begin_imports
from toolkit.launch.group import WorkerGroup
from toolkit.recipe.load import recipe_from
before = dict(os.environ)
begin_imports(recipe_from(sys.argv[1], []))
assert dict(os.environ) == before
with WorkerGroup(2) as group:
    parents = group.run(os.getppid)
    imported = group.run(eval, "'deepspeed' in __import__('sys').modules")
    threads = group.run(eval, "__import__('torch').get_num_threads()")
print(len({*parents, os.getpid()}), imported, threads)
"""


@pytest.mark.parametrize("strategy", ["zero2", "fsdp2"])
def test_ranks_are_forks_of_one_process(strategy: str, launches: None, tiny_root: Path, tmp_path: Path) -> None:
    write_recipe(tmp_path, tiny_root, strategy={"name": strategy})
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path / "r.yaml")], capture_output=True, text=True, timeout=240, check=False
    )
    deepspeed = [strategy == "zero2"] * 2
    assert done.stdout == f"2 {deepspeed} [1, 1]\n", done.stderr
    assert done.stderr == ""


def test_without_a_place_for_the_socket_each_rank_imports_by_itself(
    launches: None, tiny_root: Path, tmp_path: Path
) -> None:
    write_recipe(tmp_path, tiny_root)
    long = tmp_path / ("d" * 100)
    long.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", NO_ROOM, str(tmp_path / "r.yaml")],
        env=os.environ | {"TMPDIR": str(long)}, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("spawn\n", "")
