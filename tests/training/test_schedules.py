"""Schedules: both implementations, transformers' own, and which of them depend on the number of steps."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.optimization import get_scheduler

from cases import every_case
from jobs import resolved_from
from tiny import recipe_dict
from toolkit.errors import InputError
from toolkit.launch.training_args import training_args
from toolkit.optim.schedule import learning_rate
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.reference.schedule import plain_learning_rate
from toolkit.training.extension import check_length
from toolkit.training.loop import Progress

TOTAL = 40
SCHEDULES: list[dict[str, Any]] = [
    {"name": "constant"},
    {"name": "linear"},
    {"name": "cosine"},
    {"name": "cosine", "min_ratio": 0.1},
    {"name": "polynomial"},
    {"name": "polynomial", "power": 2.5, "min_ratio": 0.05},
    {"name": "inverse-sqrt"},
    *({"name": "wsd", "decay_ratio": 0.3, "decay_shape": shape} for shape in ("linear", "cosine", "1-sqrt")),
    {"name": "wsd", "decay_steps": 7, "min_ratio": 0.2},
    {"name": "wsd", "decay_steps": 7},
]


def resolved(schedule: dict[str, Any], **sections: Any) -> Resolved:
    values = recipe_dict(Path("nowhere"), **({"run": {"max_steps": TOTAL}} | sections))
    values["schedule"] = schedule
    return resolved_from(values)


@every_case(("schedule", "warmup"), product(SCHEDULES, [0, 1, 6]))
def test_both_implementations_agree(schedule: dict[str, Any], warmup: int) -> None:
    one = resolved(schedule | {"warmup_steps": warmup})
    for update in range(TOTAL + 1):
        found = learning_rate(one.recipe.schedule, one.lr, update, warmup, TOTAL)
        assert found == pytest.approx(plain_learning_rate(one, update, TOTAL), rel=1e-12, abs=1e-15 * one.lr)
        assert 0 <= found <= one.lr


@every_case(("schedule", "warmup"), product(SCHEDULES, [0, 6]))
def test_the_trainer_run_from_the_same_recipe_has_the_same_rates(schedule: dict[str, Any], warmup: int) -> None:
    one = resolved(schedule | {"warmup_steps": warmup})
    arguments = training_args(one)
    if "lr_scheduler_type" not in arguments:
        assert any(decision.key == "training_args.lr_scheduler_type" for decision in one.decisions)
        assert schedule.get("min_ratio")
        assert warmup
        return
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=arguments["learning_rate"])
    theirs = get_scheduler(
        arguments["lr_scheduler_type"],
        optimizer,
        num_warmup_steps=arguments["warmup_steps"],
        num_training_steps=TOTAL,
        scheduler_specific_kwargs=dict(arguments.get("lr_scheduler_kwargs", {})),
    )
    for update in range(TOTAL):
        ours = learning_rate(one.recipe.schedule, one.lr, update, warmup, TOTAL)
        assert theirs.get_last_lr()[0] == pytest.approx(ours, rel=1e-12, abs=1e-18)
        optimizer.step()
        theirs.step()


@every_case(
    ("schedule", "done", "extends"),
    [
        ({"name": "wsd", "decay_steps": 10}, 20, True),  # the decay has not begun under either length
        ({"name": "wsd", "decay_steps": 10}, 35, False),
        ({"name": "inverse-sqrt"}, 35, True),
        ({"name": "polynomial"}, 5, False),
        ({"name": "cosine", "min_ratio": 0.1}, 5, False),
    ],
)
def test_which_schedules_a_longer_run_needs_extend_for(schedule: dict[str, Any], done: int, extends: bool) -> None:
    saved, longer = (resolved(schedule | {"warmup_steps": 2}, run={"max_steps": n}).recipe for n in (TOTAL, 60))
    progress = Progress(step=done, updates=done)

    def check() -> str | None:
        return check_length(saved, longer, None, progress, extend=False, source="recipe", folder=Path("step"))

    if extends:
        assert "are the same" in (check() or "")
    else:
        with pytest.raises(InputError, match=f"schedule.name: {schedule['name']} depends on the number of steps"):
            check()


@every_case(
    ("schedule", "message"),
    [
        ({"name": "linear", "min_ratio": 0.1}, "linear does not have this key"),
        ({"name": "cosine", "decay_steps": 3}, "cosine does not have this key"),
        ({"name": "wsd"}, "one of `decay_ratio` and `decay_steps`"),
        ({"name": "wsd", "decay_ratio": 0.1, "decay_steps": 3}, "one of `decay_ratio` and `decay_steps`"),
    ],
)
def test_keys_of_another_schedule_are_refused(schedule: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe.model_validate(recipe_dict(Path("nowhere")) | {"schedule": schedule})


@every_case(
    ("schedule", "key"),
    [
        ({"decay_steps": 39, "warmup_steps": 3}, "decay_steps"),
        ({"decay_ratio": 0.7, "warmup_ratio": 0.4}, "decay_ratio"),
    ],
)
def test_a_decay_longer_than_the_run_is_refused(schedule: dict[str, Any], key: str) -> None:
    with pytest.raises(InputError, match=f"schedule.{key}"):
        resolved({"name": "wsd"} | schedule)
