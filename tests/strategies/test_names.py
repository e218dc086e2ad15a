"""Code outside strategies/ reads the traits of a strategy and never compares its name."""

from __future__ import annotations

import ast
from pathlib import Path

from toolkit.strategies import strategies

TOOLKIT = Path(__file__).parents[2] / "toolkit"
# Launch files name strategies, and so does what wraps the model of a script that is not the toolkit's: what reads them
# has to know their names.
OF_OTHERS = ("strategies", "linting", "migration", "importing", "verification/scripts")


def compared_names(source: str, names: set[str]) -> list[str]:
    """Lines that compare something with a strategy's name, also by ``in`` or ``match``."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare | ast.MatchValue) and names & {
            constant.value for constant in ast.walk(node) if isinstance(constant, ast.Constant)
        }:
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def test_no_code_compares_the_name_of_a_strategy() -> None:
    names = set(strategies())
    assert compared_names("if recipe.strategy.name in ('zero1', 'zero3'): pass", names)
    assert compared_names("match name:\n    case 'ddp': pass", names)
    found = {
        str(path.relative_to(TOOLKIT)): lines
        for path in sorted(TOOLKIT.rglob("*.py"))
        if not str(path.relative_to(TOOLKIT)).startswith(OF_OTHERS)
        and (lines := compared_names(path.read_text(encoding="utf-8"), names))
    }
    assert not found
