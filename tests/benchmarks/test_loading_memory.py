"""Loading by part takes the part and the largest weight of the host's memory, and reads the part alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import checkpoints, loading
from toolkit.launch.group import WorkerGroup
from toolkit.strategies import strategies

GIGABYTES = 0.3
LARGEST = 4 * loading.VOCABULARY * loading.WIDTH
OVER = {"zero3": 1.1, "fsdp2": 1.1, "fsdp1": 1.45}
"""Of the part and the largest weight: buffers of reading and pages of allocators, measured 0.90 to 1.01 for zero3 and
fsdp2. FSDP1 has a unit whole beside its parts: here the head, 64 MiB more, is 1.29."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("loading") / "model"
    loading.save(str(made), GIGABYTES)
    return made


@pytest.mark.group
@pytest.mark.parametrize("strategy", [name for name in strategies() if name in loading.STRATEGIES])
def test_a_process_takes_its_part_and_the_largest_weight(strategy: str, folder: Path, group: WorkerGroup) -> None:
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    tiny = loading.config(0.001) | {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64}
    cases = [loading.resolved_for(strategy, 2, model) for model in ({"path": str(folder)}, {"config": tiny})]
    part, whole = (group.run(loading.load, *cases, by_part, timeout=200) for by_part in (True, False))
    for rank in (0, 1):
        assert part[rank]["whole"] is None
        assert part[rank]["read"] < 1.05 * size / 2
        assert part[rank]["weights"] < OVER[strategy] * (size / 2 + LARGEST)
        assert whole[rank]["weights"] > size


@pytest.mark.group
@pytest.mark.parametrize("strategy", loading.STRATEGIES)
def test_a_checkpoint_takes_its_part(strategy: str, folder: Path, group: WorkerGroup, tmp_path: Path) -> None:
    """Saving and resuming: memory, and bytes that a process writes and reads."""
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    tiny = loading.config(0.001) | {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64}
    cases = [loading.resolved_for(strategy, 2, model) for model in ({"path": str(folder)}, {"config": tiny})]
    for rank in group.run(checkpoints.keep, *cases, str(tmp_path), timeout=200):
        assert size / 2 < rank["written"] < 1.05 * size / 2
        assert size < rank["read"] < 1.05 * size  # its half of the files for their sums, and its half of the weights
        assert rank["save"] < 1.1 * (size / 2 + LARGEST)
        assert rank["resume"] < 1.1 * (size / 2 + LARGEST)
