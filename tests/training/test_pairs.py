"""Every strategy and number of processes goes on with what every other has saved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs import Run, resolved_from, train_job, worst
from tiny import recipe_dict
from toolkit.launch.group import WorkerGroup
from toolkit.recipe.resolve import Resolved
from toolkit.training.finding import newest

PLACES = [("single", 1)] + [
    (strategy, world) for strategy in ("ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2") for world in (1, 2, 3)
]
BEFORE, AFTER = 2, 5


@pytest.fixture(scope="module")
def groups(launches: None) -> Iterator[dict[int, WorkerGroup]]:
    with WorkerGroup(1) as one, WorkerGroup(2) as two, WorkerGroup(3) as three:
        yield {1: one, 2: two, 3: three}


def recipe(strategy: str, world: int, root: Path, **sections: Any) -> Resolved:
    """The same six samples a step in every place; no dropout, whose masks are a rank's own."""
    rows = {1: (2, 3), 2: (1, 3), 3: (1, 2)}[world]
    values = recipe_dict(
        root,
        strategy={"name": strategy},
        machine={"processes": world},
        batch={"micro_size": rows[0], "accumulation": rows[1]},
        run={"max_steps": BEFORE + AFTER, "eval_every": None},
        **sections,
    )
    return resolved_from(values)


@pytest.fixture(scope="module")
def whole(tiny_root: Path, groups: dict[int, WorkerGroup]) -> Run:
    """The run that nothing interrupts, in one process."""
    return groups[1].run(train_job, recipe("single", 1, tiny_root), BEFORE + AFTER)[0]


@pytest.fixture(scope="module")
def saved(tiny_root: Path, groups: dict[int, WorkerGroup], tmp_path_factory: pytest.TempPathFactory) -> dict[Any, str]:
    folders: dict[Any, str] = {}
    for strategy, world in PLACES:
        folder = tmp_path_factory.mktemp(f"{strategy}-{world}-")
        groups[world].run(train_job, recipe(strategy, world, tiny_root), BEFORE, str(folder), None, BEFORE + AFTER)
        folders[strategy, world] = str(newest(folder))
    return folders


@pytest.mark.nightly
@pytest.mark.parametrize(("strategy", "world"), PLACES)
def test_every_ordered_pair(
    strategy: str, world: int, tiny_root: Path, groups: dict[int, WorkerGroup], whole: Run, saved: dict[Any, str]
) -> None:
    """Adam divides a gradient by its own size, so five steps make a rounding no larger: 1e-6 of a tensor is what is
    asked, a few float32 roundings (1.2e-7)."""
    errors = {}
    for source, folder in saved.items():
        run: Run = groups[world].run(
            train_job, recipe(strategy, world, tiny_root), AFTER, None, folder, BEFORE + AFTER
        )[0]
        assert run.losses == pytest.approx(whole.losses[BEFORE:], rel=1e-6), source
        errors[source] = worst(run.weights, whole.weights)
    print(f"{strategy} on {world}: worst {max(error for error, _ in errors.values()):.1e} of {len(errors)}")
    assert {source: error for source, error in errors.items() if error[0] > 1e-6} == {}
    assert len(errors) == len(PLACES)
