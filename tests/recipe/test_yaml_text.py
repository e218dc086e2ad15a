"""What is written as YAML reads as what it was written from, by both readers there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from cases import every_case
from tiny import recipe_dict
from toolkit.linting.edits import render
from toolkit.recipe.load import load_recipe, recipe_yaml, validate
from toolkit.recipe.positions import Document, parse
from toolkit.recipe.yaml_text import dump, scalar

VALUES: list[Any] = [
    "7e31415", "1e5", "0o7", "no", "on", "12:30", "2026-11-27", "a: b", "#x", "", " x ", "é😀", "two\nlines", "<<",
    "one word after another " * 20, "a, b", "x]", "{", "http://a:80",
    "C:", None, True, 5, 1e-5, 2e20, float("inf"), [1, "x", "1e5"], {"path": "a#b"},
]  # fmt: skip


@every_case("value", VALUES, ids=repr)
def test_both_readers_read_what_was_written(value: Any) -> None:
    lines = (f"key: {scalar(value)}  # comment", f"key: {render(value, 'yaml')}", dump({"key": value}),
             f"{{key: {scalar(value)}}}")  # fmt: skip
    for text in lines:
        assert parse(text, "x").value == {"key": value}
        assert yaml.safe_load(text) == {"key": value}
    assert "\n" not in scalar(value)


def test_a_commit_whose_name_looks_like_a_number(tiny_root: Path, tmp_path: Path) -> None:
    """`revision: "7e31415"` was written without its quotes, and then was no text."""
    values = recipe_dict(tiny_root, model={"path": "some/model", "config": None, "revision": "7e31415"})
    recipe = validate(Document("x", values))
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe_yaml(recipe))
    assert load_recipe(file) == recipe
