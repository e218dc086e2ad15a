"""Recipes that earlier versions wrote are read with today's schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tiny import recipe_dict
from toolkit.errors import InputError
from toolkit.launch.output import check_folder, claim_folder
from toolkit.recipe.earlier import read_earlier, recipe_version
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve


def written(folder: Path = Path("nowhere")) -> dict[str, Any]:
    return Recipe.model_validate(recipe_dict(folder, run={"output_dir": str(folder / "run")})).model_dump(mode="json")


def renamed(values: dict[str, Any]) -> None:
    values["run"]["seed"] = values["run"].pop("random_seed")


def removed(values: dict[str, Any]) -> None:
    del values["data"]["cleaning"]


def test_a_key_that_is_new_has_its_default() -> None:
    values = written()
    del values["optimizer"]["kernel"], values["fp8"]
    assert read_earlier(values, 0, "recipe.json") == Recipe.model_validate(written())


def test_migrations_are_applied_from_the_version_that_wrote_it() -> None:
    values = written()
    values["run"]["random_seed"] = values["run"].pop("seed")
    both = values | {"data": values["data"] | {"cleaning": "none"}}
    steps = (renamed, removed)
    assert read_earlier(both, 0, "recipe.json", steps).run.seed == 3
    assert "random_seed" in both["run"], "what was read stays as it was"
    between = written()
    between["data"]["cleaning"] = "none"
    assert read_earlier(between, 1, "recipe.json", steps) == Recipe.model_validate(written())
    assert read_earlier(written(), 2, "recipe.json", steps) == Recipe.model_validate(written())


def test_a_key_without_a_place_is_named() -> None:
    values = written()
    values["run"]["random_seed"] = values["run"].pop("seed")
    with pytest.raises(InputError, match=r"recipe\.json: this version cannot read it \(run\.random_seed: extra inputs"):
        read_earlier(values, 0, "recipe.json")


def test_a_later_version_is_refused() -> None:
    with pytest.raises(InputError, match=r"recipe\.json: written by a later version.*update the toolkit"):
        read_earlier(written(), recipe_version() + 1, "recipe.json")


def test_a_run_folder_of_an_earlier_version_is_known_again(tmp_path: Path) -> None:
    """The same recipe started again moves the earlier run aside; it is not taken for another recipe's."""
    import json

    resolved = resolve(Recipe.model_validate(written(tmp_path)), "r.yaml")
    claim_folder(resolved, resume=False)
    mark = tmp_path / "run" / "recipe.json"
    content = json.loads(mark.read_text())
    del content["recipe"]["optimizer"]["kernel"], content["recipe_version"]
    mark.write_text(json.dumps(content | {"recipe_sha256": "of the recipe without the key"}))
    check_folder(resolved, resume=False)
    content["recipe"]["run"]["seed"] = 4
    mark.write_text(json.dumps(content))
    with pytest.raises(InputError, match="a run of another recipe"):
        check_folder(resolved, resume=False)
