"""Measures cells and predicts them; ``PYTHONPATH=tests python -m plan.truth`` prints the table of docs/planning.md."""

from __future__ import annotations

import sys
import warnings
from typing import Any

from plan.cells import BUCKET, BUILT, HELD_OUT, Cell


def measured(recipe: dict[str, Any], length: int) -> int:
    """Runs on a rank: the peak of the second step, in bytes."""
    warnings.filterwarnings("ignore")
    from toolkit.plan.measure import measure

    return measure(_resolved(recipe), length).peak


def predicted(cell: Cell) -> int:
    from toolkit.plan.predict import Planner

    resolved = _resolved(cell.recipe())
    return Planner.of(resolved, cell.length).memory(resolved).peak


def _resolved(recipe: dict[str, Any]) -> Any:
    import toolkit.strategies.zero as zero
    from toolkit.recipe.schema import Recipe
    from toolkit.strategies import resolve

    original, zero._BUCKET = zero._BUCKET, BUCKET
    try:
        return resolve(Recipe.model_validate(recipe))
    finally:
        zero._BUCKET = original


def main(which: str = "") -> None:
    from toolkit.errors import ToolkitError
    from toolkit.launch.group import WorkerGroup

    warnings.filterwarnings("ignore")
    with WorkerGroup(1) as one, WorkerGroup(2) as two:
        for title, cells in (("held out", HELD_OUT), ("built", BUILT)):
            for cell in cells:
                if which not in cell.name:
                    continue
                try:
                    group = one if cell.strategy == "single" else two
                    real = max(group.run(measured, cell.recipe(), cell.length))
                    said = predicted(cell)
                    print(f"| {title} | {cell.name} | {said / 1e6:.2f} | {real / 1e6:.2f} | {said / real - 1:+.1%} |",
                          flush=True)  # fmt: skip
                except ToolkitError as error:
                    print(f"| {title} | {cell.name} | failed | {str(error).strip().splitlines()[-1][:300]}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
