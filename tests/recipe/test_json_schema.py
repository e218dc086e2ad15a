"""The JSON schema accepts what the toolkit accepts and refuses what it refuses; `init` names it in the recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import ValidationError
from typer.testing import CliRunner

from cases import every_case
from toolkit.cli import app
from toolkit.recipe.json_schema import COMMENT, FILE_NAME, recipe_schema
from toolkit.recipe.positions import read
from toolkit.recipe.schema import Recipe

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted([*ROOT.glob("ds_configs/*/recipe.yaml"), *ROOT.glob("examples/**/*.yaml")])
GOOD: dict[str, Any] = {"model": {"path": "some/model"}, "data": {"train": "train.jsonl"}}
VALIDATOR = Draft202012Validator(recipe_schema())


def test_the_schema_is_valid() -> None:
    Draft202012Validator.check_schema(recipe_schema())


@every_case("file", RECIPES, ids=lambda file: str(file.relative_to(ROOT)))
def test_recipes_of_the_repository_pass(file: Path) -> None:
    assert [error.message for error in VALIDATOR.iter_errors(read(file).value)] == []


# section, values, whether they are accepted
CASES: list[tuple[str, Any, bool]] = [
    ("model", {"path": "a", "config": {"model_type": "llama"}}, False),
    ("model", {"path": None, "config": {"model_type": "llama"}}, True),
    ("model", {"path": "a", "config": None}, True),
    ("model", {"task": "causal-lm"}, False),
    ("model", {"config": {"hidden_size": 8}}, False),
    ("run", {"max_steps": 3, "epochs": 1}, False),
    ("run", {"max_steps": 3, "epochs": None}, True),
    ("run", {"sead": 1}, False),
    ("schedule", {"warmup_ratio": 0.1, "warmup_steps": 3}, False),
    ("schedule", {"warmup_steps": 3}, True),
    ("optimizer", {"lr": 0}, False),
    ("optimizer", {"lr": 1}, True),
    ("optimizer", {"betas": [0.9]}, False),
    ("optimizer", {"name": "sgd", "betas": [0.9, 0.99]}, False),
    ("optimizer", {"name": "sgd", "momentum": 0.9, "nesterov": True}, True),
    ("optimizer", {"momentum": 0.9}, False),
    ("optimizer", {"momentum": None}, True),
    ("optimizer", {"groups": [{"match": "norm"}]}, False),
    ("optimizer", {"groups": [{"match": "norm", "weight_decay": 0.0}]}, True),
    ("optimizer", {"lr_scaling": "sqrt"}, False),
    ("optimizer", {"lr_scaling": "sqrt", "base_global_batch": 8}, True),
    ("schedule", {"name": "wsd"}, False),
    ("schedule", {"name": "wsd", "decay_ratio": 0.2, "decay_shape": "1-sqrt"}, True),
    ("schedule", {"name": "linear", "min_ratio": 0.1}, False),
    ("optimizer", {"betas": [0.9, 1.0]}, False),
    ("batch", {"micro_size": 0}, False),
    ("batch", {"micro_size": "2"}, False),
    ("strategy", {"name": "zero4"}, False),
    ("strategy", {"name": "zero3", "offload": "all"}, True),
    ("adapter", None, True),
    ("tokenizer", None, False),
    ("precision", "bf15", False),
    ("data", {"train": "x", "cache": False}, True),
    ("data", {"train": "x", "cache": True}, False),
    ("data", {}, False),
    ("colour", 1, False),
]


@every_case(("section", "value", "accepted"), CASES)
def test_schema_and_toolkit_agree(section: str, value: Any, accepted: bool) -> None:
    recipe = GOOD | {section: value}
    try:
        Recipe.model_validate(recipe)
        taken = True
    except ValidationError:
        taken = False
    assert (taken, VALIDATOR.is_valid(recipe)) == (accepted, accepted)


def test_the_command_prints_and_writes_it(tmp_path: Path) -> None:
    printed = CliRunner().invoke(app, ["schema"])
    assert json.loads(printed.output) == recipe_schema()
    target = tmp_path / "schema.json"
    assert CliRunner().invoke(app, ["schema", "-o", str(target)]).exit_code == 0
    assert target.read_text() == printed.output


def test_init_names_the_schema_and_writes_it_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["init", "-o", "first.yaml"]).exit_code == 0
    text = (tmp_path / "first.yaml").read_text()
    assert text.startswith(COMMENT)
    schema = json.loads((tmp_path / FILE_NAME).read_text())
    assert Draft202012Validator(schema).is_valid(read(tmp_path / "first.yaml").value)
    # A second recipe in the same folder renews the schema; a file of another kind is left alone.
    (tmp_path / FILE_NAME).write_text(json.dumps(schema | {"properties": {}}))
    assert CliRunner().invoke(app, ["init", "-o", "second.yaml"]).exit_code == 0
    assert json.loads((tmp_path / FILE_NAME).read_text()) == schema
    (tmp_path / FILE_NAME).write_text("{}")
    refused = CliRunner().invoke(app, ["init", "-o", "third.yaml"])
    assert "is not a recipe schema" in str(refused.exception)
    assert (tmp_path / FILE_NAME).read_text() == "{}"
    assert not (tmp_path / "third.yaml").exists()
