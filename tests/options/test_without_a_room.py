"""A copy of the package without one option's folder: all else works, and a recipe that names it gets one line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tiny import recipe_dict
from toolkit.layouts import Layout
from toolkit.rooms import all_options

ROOT = Path(__file__).parents[2]
USES: dict[str, dict[str, Any]] = {
    "activation_offload": {"activation_checkpointing": "full", "activation_offload": True},
    "batch_norm": {"model": {"batch_norm": "frozen"}},
    "ema": {"run": {"ema": {"decay": 0.9}}},
    "fp8": {"fp8": True, "precision": "bf16"},
    "liger": {"model": {"kernels": "liger"}},
    "nf4": {"adapter": {"method": "qlora", "r": 4}},
    "neftune": {"model": {"neftune_alpha": 5.0}},
    "unsharded": {
        "strategy": {"name": "fsdp2", "unsharded_blocks": 1},
        "adapter": {"method": "lora"},
        "machine": {"device": "cpu", "processes": 2},
    },
    "varlen": {"data": {"packing": True}, "model": {"attention": "varlen"}},
}
"""Of each folder what asks for it."""


def folders() -> list[str]:
    return sorted(one.name for one in (ROOT / "toolkit/options").iterdir() if (one / "spec.py").is_file())


def test_every_folder_is_taken_away_here() -> None:
    rooms = [name for name, one in all_options().items() if one.typed_key and not isinstance(one, Layout)]
    assert folders() == sorted(USES) == sorted(rooms)


@pytest.mark.nightly
@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("name", folders())
def test_without_it(name: str, tmp_path: Path, tiny_root: Path) -> None:
    shutil.copytree(ROOT / "toolkit", tmp_path / "toolkit", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(tmp_path / "toolkit/options" / name)
    run = {"max_steps": 2, "output_dir": str(tmp_path / "run")}
    for file, sections in (("plain", {}), ("with", USES[name])):
        recipe = recipe_dict(tiny_root, **sections | {"run": run | sections.get("run", {})})
        (tmp_path / f"{file}.yaml").write_text(yaml.safe_dump(recipe))

    def toolkit(*words: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": str(tmp_path)}
        command = [sys.executable, "-m", "toolkit", *words]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250, check=False
        )

    refused = toolkit("config", "with.yaml", "-o", "launch")
    assert refused.returncode == 2
    key = all_options()[name].key
    [line] = refused.stderr.strip().splitlines()
    assert f"{key}: this installation has no toolkit/options/{name}; remove the key" in line

    for words in (
        ("config", "plain.yaml", "-o", "launch"),
        ("train", "plain.yaml"),
        ("plan", "plain.yaml", "--gpu", "h100"),
        ("verify", "plain.yaml", "--json", "verdict.json"),
        ("lint", "launch"),
    ):
        done = toolkit(*words)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
    assert json.loads((tmp_path / "verdict.json").read_text())["verdict"] == "equivalent"
