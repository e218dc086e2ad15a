"""The measured tolerances: how far this toolkit's own strategies are apart, and that none of them is an alarm."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest

from jobs import resolved_from, train_job
from tiny import recipe_dict
from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.verification.checkpoints.command import compare_two
from toolkit.verification.checkpoints.tolerance import DISTANCES, FLOOR, SAFETY, STEPS

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
FACTOR = 2.0  # of a measured figure: another machine multiplies in another order


def runs(precision: str, strategies: tuple[str, ...], steps: tuple[int, ...], root: Path, data: Path,
         groups: dict[int, WorkerGroup]) -> list[Path]:  # fmt: skip
    """A run folder by strategy, with a checkpoint at each of ``steps``."""
    found = []
    for strategy in strategies:
        processes = 1 if strategy == "single" else 2
        recipe = recipe_dict(
            data, strategy={"name": strategy}, precision=precision, batch={"accumulation": 4 // processes},
            machine={"processes": processes}, run={"max_steps": 100, "keep": 10},
        )  # fmt: skip
        folder, before = root / strategy / "checkpoints", None
        for first, last in itertools.pairwise((0, *steps)):
            groups[processes].run(train_job, resolved_from(recipe), last - first, str(folder), before, 100, timeout=200)
            before = str(folder / f"step-{last:08d}")
        found.append(root / strategy)
    return found


def test_two_strategies_and_a_damaged_file(
    tiny_root: Path, tmp_path: Path, group: WorkerGroup, lone_group: WorkerGroup
) -> None:
    groups = {1: lone_group, 2: group}
    a, b = runs("fp32", ("single", "ddp"), (1, 3), tmp_path, tiny_root, groups)
    found = compare_two(a, b)
    assert found.verdict == "equivalent"
    assert [one.step for one in found.steps] == [1, 3]
    last = found.steps[-1]
    assert (last.a.format, last.b.format) == ("toolkit, single", "toolkit, ddp")
    assert (last.a.compute, len(last.weights), len(last.moments["exp_avg_sq"])) == ("float32", 21, 21)
    assert last.stage("schedule").measures[0].facts["a"] == last.stage("schedule").measures[0].facts["b"] != "0"
    file = next((b / "checkpoints/step-00000003").glob("moments-00001-*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(InputError, match="damaged: checksum mismatch"):
        compare_two(a, b)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_distances_are_those_that_were_measured(
    precision: str, tiny_root: Path, tmp_path: Path, group: WorkerGroup, lone_group: WorkerGroup
) -> None:
    steps = STEPS[:3]
    groups = {1: lone_group, 2: group}
    folders = runs(precision, ("single", "ddp", "zero2", "zero3", "fsdp2"), steps, tmp_path, tiny_root, groups)
    dtype = DTYPES[precision]
    for a, b in itertools.combinations(folders, 2):
        found = compare_two(a, b)
        assert found.verdict == "equivalent", found.to_json()["first_difference"]
        for at, one in enumerate(found.steps):
            for moment, sizes in one.moments.items():
                largest = max(size.b / math.sqrt(size.elements) for size in sizes.values())
                for name, size in sizes.items():
                    floor = FLOOR[dtype][moment] * largest * math.sqrt(size.elements)
                    allowed = max(DISTANCES[dtype][moment][at] * size.b, floor)
                    assert size.difference <= FACTOR * allowed, (a.name, b.name, name, moment)


def test_what_is_allowed_follows_from_the_figures() -> None:
    for dtype, kinds in DISTANCES.items():
        assert all(len(figures) == len(STEPS) for figures in kinds.values())
        assert all(kinds["weak weight"][at] >= kinds["weight"][at] for at in range(len(STEPS)))
        assert kinds["exp_avg_sq"][-1] * SAFETY < 0.75, f"{dtype}: a doubled loss is 0.75 off"
