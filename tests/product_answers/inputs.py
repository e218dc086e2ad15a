"""What the product is asked, as plain values: drawn once, so that two versions are asked the same."""

from __future__ import annotations

from typing import Any

import yaml

from fuzz_recipes.draw import draw_recipe
from toolkit.linting.registry import all_rules
from toolkit.recipe.schema import Recipe

RECIPES, PLANS, BAD, VERDICTS = 200, 100, 150, 60
_GPUS = ("h100", "a100-80", "rtx4090", "l4")
_MIGRATED = ("zero1", "zero2", "zero3", "fsdp2")
_WRONG = ("wrong-kind", "-3", "{a: 1}", "1e99")


def make_inputs() -> dict[str, Any]:
    """By kind of question, by name: recipes as YAML, files by name, overrides."""
    recipes = [_recipe(seed) for seed in range(RECIPES)]
    from tests.importing.test_import import CASES

    examples = {f"{code} {which}": dict(files) for code, rule in all_rules().items()
                for which, files in (("fails", rule.fails), ("passes", rule.passes))}  # fmt: skip
    return {
        "config": {str(seed): text for seed, text in enumerate(recipes)},
        "plan": {f"{seed} on {_GPUS[seed % 4]}": [recipes[seed], _GPUS[seed % 4]] for seed in range(PLANS)},
        "bad": dict(zip((keys := _bad_overrides()), keys, strict=True)),
        "lint": examples,
        "migrate": {
            f"{name} to {to}": [files, to] for name, files in examples.items() if _is_launch(files) for to in _MIGRATED
        },
        "import": {tool: one if isinstance(one, str) else yaml.safe_dump(one) for tool, one in CASES.items()},
        "help": {name: name for name in _commands()},
        "verdicts": {str(seed): recipes[seed] for seed in range(VERDICTS)},
    }


def _recipe(seed: int) -> str:
    return yaml.safe_dump(draw_recipe(seed)[1], sort_keys=False)


def _is_launch(files: dict[str, str]) -> bool:
    return any("distributed_type" in text for text in files.values())


def _bad_overrides() -> list[str]:
    """Every key of the recipe with a value that it cannot have, in turn, and some that are none."""
    keys = [*_keys(Recipe.model_json_schema()), "optimizer.learning_rate", "trainer.epochs", "model.pth"]
    return [f"{key}={_WRONG[number % 4]}" for number, key in enumerate((keys * 2)[:BAD])]


def _keys(schema: dict[str, Any]) -> list[str]:
    keys = []
    for section, entry in schema["properties"].items():
        options = [entry, *entry.get("anyOf", [])]
        named = next((option["$ref"].rpartition("/")[2] for option in options if "$ref" in option), None)
        inner = schema["$defs"][named].get("properties") if named else None
        keys += [f"{section}.{key}" for key in inner] if inner else [section]
    return keys


def _commands() -> list[str]:
    import typer

    from toolkit.cli import app

    return ["", *sorted(typer.main.get_command(app).commands)]  # type: ignore[attr-defined]
