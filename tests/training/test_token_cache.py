"""A run from cached tokens is the run without, bit for bit; of two ranks one tokenises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jobs import resolved_from, train_job
from tiny import recipe_dict
from toolkit.data.loader import open_data
from toolkit.launch.group import WorkerGroup
from toolkit.model.processor import load_tokenizer
from toolkit.recipe.resolve import Resolved


def came_job(resolved: Resolved) -> str:
    samples: Any = open_data(resolved.recipe, "train", load_tokenizer(resolved.recipe))
    return samples.came.came


def test_the_run_is_the_same(group: WorkerGroup, tiny_root: Path, tmp_path: Path) -> None:
    kept, plain = (
        resolved_from(recipe_dict(tiny_root, data={"cache": cache, "packing": True}))
        for cache in (str(tmp_path), False)
    )
    assert sorted(group.run(came_job, kept)) == ["cache", "made"]
    assert group.run(came_job, kept) == ["cache", "cache"]
    one, other = (group.run(train_job, resolved, 3)[0] for resolved in (kept, plain))
    assert one.losses == other.losses
    assert all(one.weights[name].equal(weight) for name, weight in other.weights.items())
