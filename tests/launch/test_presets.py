"""Presets and example recipes: what the command writes today, and clean by the toolkit's own linter."""

from __future__ import annotations

from pathlib import Path

import pytest

from cases import every_case
from toolkit.launch.files import launch_files
from toolkit.linting.engine import lint
from toolkit.recipe.load import load_recipe
from toolkit.strategies import resolve

ROOT = Path(__file__).parents[2]
PRESETS = sorted(path.parent.name for path in ROOT.glob("ds_configs/*/recipe.yaml"))


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@every_case("name", PRESETS)
def test_a_preset_is_what_the_command_writes(name: str) -> None:
    recipe = f"ds_configs/{name}/recipe.yaml"
    files = launch_files(resolve(load_recipe(recipe), recipe), f"ds_configs/{name}", recipe)
    written = {p.name: p.read_text() for p in (ROOT / "ds_configs" / name).iterdir() if p.name != "recipe.yaml"}
    assert written == files


def test_every_preset_is_in_the_table() -> None:
    table = (ROOT / "ds_configs/README.md").read_text()
    assert len(PRESETS) >= 14
    assert all(f"| `{name}` |" in table for name in PRESETS)


@every_case("name", PRESETS)
def test_a_preset_has_no_trap(name: str) -> None:
    files = [f"ds_configs/{name}/{f}" for f in ("accelerate.yaml", "deepspeed.json", "training_args.json")]
    present = [file for file in files if (ROOT / file).exists()]
    assert not lint(present).failed


@every_case("file", sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("examples/*.yaml")))
def test_an_example_recipe_resolves_without_a_network(file: str) -> None:
    resolved = resolve(load_recipe(file), file)
    assert launch_files(resolved, "launch", file)
    command = "train" if resolved.recipe.machine.nodes == 1 else "config"  # launch files start several nodes
    assert f"toolkit {command} {file}" in (ROOT / file).read_text()
