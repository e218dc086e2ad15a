"""The optimizer of docs/how-to/add-an-optimizer.md, in that file alone, through config, train, verify and plan."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from jobs import plain_run, train_job, worst
from plugin_pages import plugin_of
from tiny import recipe_dict
from toolkit.cli import app
from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.optimizers import REGISTERED, optimizer_names
from toolkit.recipe.load import load_recipe
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve
from toolkit.verification.run import verify

NAME = "averaged-sgd"


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with plugin_of("add-an-optimizer.md", tmp_path_factory.mktemp("plugin"), REGISTERED, NAME) as file:
        yield file


@pytest.fixture(scope="module")
def group(plugin: Path, launches: None) -> Iterator[WorkerGroup]:
    """Two processes that know the optimizer: they inherit the variable."""
    with WorkerGroup(2) as workers:
        yield workers


def recipe(tiny_root: Path, **sections: Any) -> dict[str, Any]:
    return recipe_dict(tiny_root, **({"optimizer": {"name": NAME, "lr": 0.1}} | sections))


def resolved(tiny_root: Path, **sections: Any) -> Any:
    return resolve(Recipe.model_validate(recipe(tiny_root, **sections)), device="cpu")


@pytest.fixture
def recipe_file(plugin: Path, tiny_root: Path, tmp_path: Path) -> Path:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe(tiny_root, run={"output_dir": str(tmp_path / "run")}), sort_keys=False))
    return file


def test_its_name_and_defaults_are_known(recipe_file: Path) -> None:
    assert optimizer_names()[-1] == NAME
    read = load_recipe(recipe_file)
    assert (read.optimizer.name, read.optimizer.momentum) == (NAME, 0.9)
    done = CliRunner().invoke(app, ["config", str(recipe_file), "-o", str(recipe_file.parent / "launch"), "--explain"])
    assert done.exit_code == 0, done.output
    assert f"the Trainer has no equivalent of {NAME}" in done.output


def test_a_key_of_another_optimizer_is_refused(recipe_file: Path) -> None:
    with pytest.raises(InputError, match=rf"optimizer\.eps: {NAME} does not have this key"):
        load_recipe(recipe_file, ["optimizer.eps=1e-8"])


def test_training_equals_the_plain_loop(tiny_root: Path, group: WorkerGroup) -> None:
    own = resolved(tiny_root)
    plain = plain_run(own, 4)
    run = group.run(train_job, own, 4)[0]
    assert run.losses == pytest.approx(plain.losses, rel=1e-5)
    error, name = worst(run.weights, plain.weights)
    assert error < 1e-5, name
    sgd = plain_run(resolved(tiny_root, optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.9}), 4)
    assert not all(torch.equal(sgd.weights[name], plain.weights[name]) for name in plain.weights), "sgd trains the same"


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp2"])
def test_verify_proves_it(strategy: str, tiny_root: Path, group: WorkerGroup) -> None:
    outcome = verify(resolved(tiny_root, strategy={"name": strategy}), group=group, time_limit=120)
    assert outcome.verdict == "equivalent", (outcome.difference, outcome.failure, outcome.unproven)


def test_plan_counts_one_moment(recipe_file: Path, tmp_path: Path) -> None:
    states = []
    for name in (NAME, "adamw"):
        file = tmp_path / f"{name}.json"
        words = [f"optimizer.name={name}", "--gpu", "h100", "--json", str(file)]
        done = CliRunner().invoke(app, ["plan", str(recipe_file), *words])
        assert done.exit_code == 0, done.output
        own = next(one for one in json.loads(file.read_text())["candidates"] if one["asked"])
        states.append(own["breakdown"]["optimizer"])
    assert states[1] == pytest.approx(2 * states[0], rel=0.01)
