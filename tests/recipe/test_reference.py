"""docs/recipe.md is what the schema says."""

from __future__ import annotations

from pathlib import Path

from docsite.recipe_page import reference
from toolkit.recipe.schema import Recipe


def test_the_page_is_current() -> None:
    assert (Path(__file__).parents[2] / "docs/recipe.md").read_text() == reference()


def test_every_key_of_a_section_has_a_row() -> None:
    page = reference()
    assert all(f"## {name}" in page or f"| `{name}` |" in page for name in Recipe.model_fields)
    assert page.count("\n| `") > 50
