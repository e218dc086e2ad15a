"""Loading by part takes the part and the largest weight of the host's memory, and reads the part alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import checkpoints, loading
from nights import nightly_but
from toolkit.launch.group import WorkerGroup
from toolkit.strategies import strategies

GIGABYTES = 0.3
LARGEST = 4 * loading.VOCABULARY * loading.WIDTH
OVER = 1.1
"""Of the part and the largest weight: buffers of reading and pages of allocators, measured 0.90 to 1.01."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("loading") / "model"
    loading.save(str(made), GIGABYTES)
    return made


@pytest.mark.parametrize(
    "strategy", nightly_but([name for name in strategies() if name in loading.STRATEGIES], "fsdp2")
)
def test_a_process_takes_its_part_and_the_largest_weight(strategy: str, folder: Path, group: WorkerGroup) -> None:
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    tiny = loading.config(0.001) | {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64}
    cases = [loading.resolved_for(strategy, 2, model) for model in ({"path": str(folder)}, {"config": tiny})]
    part, whole = (group.run(loading.load, *cases, by_part, timeout=200) for by_part in (True, False))
    for rank in (0, 1):
        assert part[rank]["whole"] is None
        assert part[rank]["read"] < 1.05 * size / 2
        assert part[rank]["weights"] < OVER * (size / 2 + LARGEST)
        assert whole[rank]["weights"] > size


@pytest.mark.parametrize("strategy", nightly_but(loading.STRATEGIES, "zero3"))
def test_a_checkpoint_takes_its_part(strategy: str, folder: Path, group: WorkerGroup, tmp_path: Path) -> None:
    """Saving and resuming: memory, and bytes that a process writes and reads."""
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    tiny = loading.config(0.001) | {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64}
    cases = [loading.resolved_for(strategy, 2, model) for model in ({"path": str(folder)}, {"config": tiny})]
    for rank in group.run(checkpoints.keep, *cases, str(tmp_path), timeout=200):
        assert size / 2 < rank["written"] < 1.05 * size / 2
        assert size / 2 < rank["read"] < 1.05 * size / 2, "validated while it is read, not before"
        assert rank["save"] < 1.1 * (size / 2 + LARGEST)
        assert rank["resume"] < 1.1 * (size / 2 + LARGEST)


@pytest.mark.nightly
def test_an_export_reads_each_byte_once(folder: Path, group: WorkerGroup, tmp_path: Path) -> None:
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    tiny = loading.config(0.001) | {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64}
    cases = [loading.resolved_for("fsdp2", 2, model) for model in ({"path": str(folder)}, {"config": tiny})]
    group.run(checkpoints.keep, *cases, str(tmp_path), timeout=200)
    steps = [str(next((tmp_path / name).glob("step-*"))) for name in ("tiny", "large")]
    with WorkerGroup(1) as one:
        [found] = one.run(checkpoints.take, *steps, str(tmp_path), True, timeout=200)
    assert size < found["written"] < 1.05 * size
    assert size < found["read"] < 1.05 * size
    assert found["export"] < 2 * LARGEST


DRAWN: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 8192, "num_hidden_layers": 4,
    "num_attention_heads": 4, "vocab_size": 8192, "tie_word_embeddings": False,
}  # fmt: skip
"""Two weights of 8 MiB beside the blocks, twelve within them, and small ones."""
WEIGHT = 4 * 8192 * 256
PART = (14 * WEIGHT + 4 * (16 * 256 * 256 + 9 * 256)) // 2
"""Bytes of a half: weights, those of the attentions, norms."""
SLACK = 12 * 2**20
"""Bytes: what Python and torch keep for a model of 39 tensors, and pages that an allocator has begun or not yet given
back, measured 0.6 to 9 MiB. The whole model is 58 MiB more than the part."""


_HALF = """
import json, sys, torch
from benchmarks import loading
from benchmarks.measuring import forget_peak, status
from toolkit.model.load import load_base
from toolkit.model.sources import fill, sources

large, tiny = (loading.resolved_for("fsdp2", 2, {"config": json.loads(text)}) for text in sys.argv[1:])
load_base(tiny, by_part=True)  # all is imported
before = forget_peak()
model, kept = load_base(large, by_part=True), []
for source in sources(model).items():
    kept.append(torch.empty(model.get_parameter(source[0]).numel() // 2))
    fill(kept[-1], source[1], 0)
print(status("VmHWM") - before, 4 * sum(shard.numel() for shard in kept))
"""


@pytest.mark.usefixtures("launches")
def test_drawing_by_part_leaves_no_weights_in_the_heap() -> None:
    """Drawn weights that are dropped had stayed in glibc's heap: small tensors that are kept got their memory, so that
    the next weight did not fit there any more. The whole model was resident at the end. In a process of its own: in one
    that has loaded models before, the small ones may fit into old holes."""
    tiny = DRAWN | {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64}
    command = [sys.executable, "-c", _HALF, *map(json.dumps, (DRAWN, tiny))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    grown, part = map(int, done.stdout.split())
    assert part == PART
    assert grown < part + WEIGHT + SLACK


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", loading.STRATEGIES)
def test_each_process_draws_its_part(strategy: str, group: WorkerGroup) -> None:
    tiny = DRAWN | {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64}
    cases = [loading.resolved_for(strategy, 2, {"config": config}) for config in (DRAWN, tiny)]
    for found in group.run(loading.load, *cases, True, timeout=250):
        assert found["whole"] is None
        assert found["weights"] < PART + WEIGHT + SLACK
