"""Blocks' inputs in host memory: what the plan says stays on the device, against what does.

On a CPU there is one memory; a mover that keeps its copies as NumPy arrays, which no count of tensors sees, stands in
for the host's.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plan.cells import Cell
from plan.test_command import BIG, planned
from plan.truth import resolved_from
from toolkit.launch.group import WorkerGroup
from toolkit.studio.plan_task import way

LONG = 384
"""Tokens: blocks' inputs are a good part of the peak."""


@pytest.fixture(scope="module")
def pair() -> Iterator[WorkerGroup]:
    with WorkerGroup(2) as group:
        yield group


def moved_away(recipe: dict[str, Any], away: bool) -> Any:
    resolved = resolved_from(recipe)
    return dataclasses.replace(resolved, recipe=resolved.recipe.model_copy(update={"activation_offload": away}))


def measured(recipe: dict[str, Any], length: int, away: bool) -> int:
    """Runs on a rank."""
    from toolkit.options.activation_offload import apply
    from toolkit.planning.measure import measure

    warnings.filterwarnings("ignore")
    original = apply.HostStore
    apply.HostStore = lambda: original(_OutOfSight)  # type: ignore[misc,assignment]
    try:
        return measure(moved_away(recipe, away), length).peak
    finally:
        apply.HostStore = original  # type: ignore[misc]


class _OutOfSight:
    """Copies as the GPU's mover does, at once; the last tensor that left stays until the next leaves or one is read."""

    def __init__(self, device: Any) -> None:
        self.leaving: Any = None

    def out(self, tensor: Any) -> Any:
        import torch

        self.settle()
        self.leaving = tensor
        return tensor.shape, tensor.dtype, tensor.contiguous().view(torch.uint8).numpy().copy()

    def back(self, host: Any) -> Any:
        import torch

        shape, dtype, data = host
        return torch.empty(shape, dtype=dtype).copy_(torch.from_numpy(data).view(dtype).view(shape))

    def settle(self) -> None:
        self.leaving = None


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize(
    ("strategy", "lora"),
    [
        ("ddp", False),
        pytest.param("fsdp2", True, marks=pytest.mark.nightly),
        pytest.param("ddp", True, marks=pytest.mark.nightly),
        pytest.param("zero2", False, marks=pytest.mark.nightly),
        pytest.param("zero2", True, marks=pytest.mark.nightly),
        pytest.param("fsdp2", False, marks=pytest.mark.nightly),
    ],
)
def test_what_stays_on_the_device(strategy: str, lora: bool, pair: WorkerGroup) -> None:
    from toolkit.planning.predict import Planner

    cell = Cell("llama-tied", lora, strategy, "full", LONG)
    real, whole = (max(pair.run(measured, cell.recipe(), LONG, away)) for away in (True, False))
    planner = Planner.of(resolved_from(cell.recipe()), LONG)
    asked = moved_away(cell.recipe(), True)
    said = planner.memory(asked).peak
    assert said == pytest.approx(real, rel=0.05)
    assert planner.away(asked) == planner.held(asked) > 0
    # Six blocks hold: one is on its way, the others are gone. Where the peak was among them it shows.
    assert real <= whole
    assert whole - real <= planner.held(asked)


def test_it_is_offered_where_nothing_else_fits(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(BIG))
    overrides = ("batch.accumulation=1", "loss=fused")
    status, result = planned(tmp_path, str(config), memory=2.6, lora=8, length=8192, overrides=overrides)
    assert status == 1
    assert result["smallest_change"].startswith("activation_offload=true (-")
    asked, chosen = result["candidates"][0], result["candidates"][result["chosen"]]
    assert (asked["activation_offload"], chosen["activation_offload"]) == (False, True)
    # About 8,192 x 1,024 numbers in 16 bits for each of 16 blocks.
    assert chosen["host_bytes"] - asked["host_bytes"] == pytest.approx(16 * 8192 * 1024 * 2, rel=0.1)
    assert asked["peak_bytes"] > chosen["peak_bytes"]
    assert ["activation_offload", "true"] in way(chosen)
    assert ["activation_offload", None] in way(asked)
