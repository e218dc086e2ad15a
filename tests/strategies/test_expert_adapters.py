"""FSDP1 cannot train adapters on experts' fused weights: it is found before anything is wrapped."""

from __future__ import annotations

from pathlib import Path

import pytest

from families import EVERY_FAMILY
from tiny import recipe_dict
from toolkit.errors import InputError
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve
from toolkit.strategies.engines.fsdp1 import _exchanges_weights
from toolkit.training.preparation import prepare_model


@pytest.mark.parametrize(("targets", "found"), [(None, True), (["q_proj", "v_proj"], False)])
def test_adapters_on_fused_weights_are_found(targets: list[str] | None, found: bool, tmp_path: Path) -> None:
    model = {"config": dict(EVERY_FAMILY["mixtral"]["config"])}
    adapter = {"r": 4} | ({"target_modules": targets} if targets else {})
    resolved = resolve(Recipe.model_validate(recipe_dict(tmp_path, model=model, adapter=adapter)), "r", device="cpu")
    assert bool(_exchanges_weights(prepare_model(resolved, 0).model)) == found


def test_a_recipe_that_names_experts_is_refused_at_once(tmp_path: Path) -> None:
    """`toolkit config` wrote files for a run that could not start."""
    model = {"config": dict(EVERY_FAMILY["mixtral"]["config"])}
    adapter = {"r": 4, "target_modules": ["q_proj"], "options": {"target_parameters": ["experts.gate_up_proj"]}}
    values = recipe_dict(tmp_path, model=model, adapter=adapter)
    for name in ("fsdp1", "fsdp2"):
        recipe = Recipe.model_validate(values | {"strategy": {"name": name}, "machine": {"processes": 2}})
        if name == "fsdp2":
            resolve(recipe, "r", device="cpu")
            continue
        with pytest.raises(InputError, match=r"r: strategy\.name: fsdp1 .* use fsdp2, or set adapter\.target_modules"):
            resolve(recipe, "r", device="cpu")
