"""The bytes that a node reads and writes, against real files; and seconds of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import loading
from jobs import resolved_from, train_job
from tiny import LLAMA, recipe_dict
from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.planning.command import Request, make_plan
from toolkit.planning.storage import Storage
from toolkit.training.finding import newest
from toolkit.training.tensor_folder import read_index

CASES: list[dict[str, Any]] = [
    {"strategy": {"name": "ddp"}},
    {"strategy": {"name": "zero3"}, "precision": "bf16"},
    {"strategy": {"name": "fsdp2"}, "adapter": {"r": 4}},
    {"strategy": {"name": "fsdp1"}, "precision": "bf16-pure"},
    {"strategy": {"name": "fsdp2"}, "optimizer": {"name": "adamw8bit", "lr": 1e-3}},
    {"strategy": {"name": "ddp"}, "optimizer": {"name": "muon", "lr": 1e-3}},
    {"strategy": {"name": "ddp", "mesh": {"pipeline": 2}}},
    {"strategy": {"name": "ddp", "mesh": {"pipeline": 2}}, "model": {"config": LLAMA | {"tie_word_embeddings": True}}},
    {"strategy": {"name": "zero1"}, "optimizer": {"name": "lion", "lr": 1e-3}},
]


def predicted(recipe: dict[str, Any], folder: Path, disk: float | None = None) -> dict[str, Any]:
    file = folder / "recipe.yaml"
    file.write_text(json.dumps(recipe))
    return make_plan(Request(str(file), memory=8.0, disk=disk)).to_json()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["strategy"]["name"])
def test_a_checkpoint_has_the_bytes_that_are_planned(
    case: dict[str, Any], tiny_root: Path, tmp_path: Path, group: WorkerGroup
) -> None:
    recipe = recipe_dict(tiny_root, **{"adapter": None} | case)
    group.run(train_job, resolved_from(recipe), 1, str(tmp_path / "c"), None, 2)
    folder = newest(tmp_path / "c")
    assert folder is not None
    indexes = read_index(folder, json.loads((folder / "manifest.json").read_text()))
    found = sum(entry.numel * entry.dtype.itemsize for index in indexes for entry in index.values())
    asked = predicted(recipe, tmp_path)["candidates"][0]["disk"]
    assert asked["save_bytes"] == found
    assert asked["resume_bytes"] == found, "one node reads what there is"
    assert asked["load_bytes"] == 0, "the model is made from a config"


def test_the_model_is_read_once_by_a_node(tmp_path: Path) -> None:
    loading.save(str(tmp_path / "model"), 0.05)
    size = sum(path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors"))
    base = recipe_dict(tmp_path, adapter=None) | {"model": {"path": str(tmp_path / "model")}}
    for name, nodes, share in (("ddp", 1, 1.0), ("fsdp2", 1, 1.0), ("fsdp2", 4, 0.25), ("ddp", 4, 1.0)):
        recipe = base | {"strategy": {"name": name}, "machine": {"device": "cuda", "processes": 2, "nodes": nodes}}
        disk = predicted(recipe, tmp_path)["candidates"][0]["disk"]
        assert disk["load_bytes"] == pytest.approx(share * size, rel=0.001)
        assert disk["save_bytes"] == pytest.approx(3 * size / nodes, rel=0.001)
        assert disk["resume_bytes"] == pytest.approx(3 * size * share, rel=0.001)


def test_seconds_at_a_speed(tmp_path: Path, tiny_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = predicted(recipe_dict(tiny_root), tmp_path, disk=2.0)
    assert found["disk_seconds"]["save"] == found["candidates"][0]["disk"]["save_bytes"] / 2e9
    assert Storage(16_000_000_000, 96_000_000_000, 96_000_000_000).line(2.0) == (
        "disk of a node at 2 GB/s: the model 16.0 GB, 8 s · a checkpoint 96.0 GB, 48 s · resuming 96.0 GB, 48 s"
    )
    with pytest.raises(InputError, match="--disk 0"):
        predicted(recipe_dict(tiny_root), tmp_path, disk=0.0)
