"""``plan --scale``: every mesh of every number of devices, each as a plan of its own says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plan.cells import LLAMA
from toolkit.planning import reuse
from toolkit.planning.command import Planned, Request, make_plan
from toolkit.planning.scale import fastest_of_each
from toolkit.planning.screen import show
from toolkit.recipe.schema import Recipe

SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16, "num_attention_heads": 16,
         "num_key_value_heads": 8, "vocab_size": 32000}  # fmt: skip


def values(strategy: dict[str, Any], processes: int, nodes: int = 1, length: int = 512) -> dict[str, Any]:
    return {
        "model": {"config": LLAMA | SIZES},
        "tokenizer": {"path": "none"},
        "data": {"train": "built-in", "max_length": length},
        "batch": {"micro_size": 1, "accumulation": 2},
        "precision": "bf16",
        "strategy": strategy,
        "run": {"max_steps": 4},
        "machine": {"device": "cuda", "processes": processes, "nodes": nodes},
    }


def planned(strategy: dict[str, Any], processes: int, nodes: int = 1, **options: Any) -> Planned:
    length = options.pop("length", 512)
    options = {"gpu": "h100"} | options
    return make_plan(Request(Recipe.model_validate(values(strategy, processes, nodes, length)), **options))


@pytest.fixture(scope="module")
def divided() -> Planned:
    """The recipe's own layers are divided over four ranks."""
    return planned({"name": "fsdp2", "mesh": {"tensor": 4}}, 4, scale=True)


@pytest.mark.parametrize(
    ("label", "strategy", "processes", "nodes"),
    [
        ("single", {"name": "single"}, 1, 1),
        ("zero2", {"name": "zero2"}, 2, 1),
        ("fsdp2 tensor 2", {"name": "fsdp2", "mesh": {"tensor": 2, "shard": 2}}, 4, 1),
        ("fsdp2 hybrid context 2", {"name": "fsdp2", "mesh": {"context": 2, "shard": 4, "replicate": 4}}, 8, 4),
    ],
)
def test_each_row_says_what_a_plan_of_it_says(
    label: str, strategy: dict[str, Any], processes: int, nodes: int, divided: Planned
) -> None:
    """Every other mesh was predicted with the recipe's own division of layers: a quarter of them."""
    rows = divided.scaled or []
    row = next(one for one in rows if one["strategy"] == label and one["devices"] == processes * nodes)
    alone = planned(strategy, processes, nodes).to_json()["candidates"][0]
    assert row["peak_bytes"] == alone["peak_bytes"]
    assert row["seconds"] == pytest.approx(alone["seconds_per_step"])


def test_the_fastest_that_fits_is_marked_and_every_row_stands_once(divided: Planned) -> None:
    rows = divided.scaled or []
    names = [(row["devices"], row["strategy"]) for row in rows]
    assert len(names) == len(set(names))
    assert {"single"} == {row["strategy"] for row in rows if row["devices"] == 1}
    for count in {row["devices"] for row in rows}:
        able = [row for row in rows if row["devices"] == count and row["fits"]]
        assert [row for row in able if row["fastest"]] == [max(able, key=lambda row: row["samples_per_second"])]
    best = {(row["devices"], row["strategy"].split()[0]): row for row in fastest_of_each(rows)}
    assert len(best) == len(fastest_of_each(rows)) == 1 + 10 * 6
    two = [row for row in rows if row["devices"] == 16 and row["strategy"].startswith("fsdp2")]
    assert {row["strategy"] for row in two} >= {"fsdp2", "fsdp2 hybrid", "fsdp2 tensor 8", "fsdp2 hybrid context 4"}
    assert best[16, "fsdp2"] == max(two, key=lambda row: row["samples_per_second"])


def test_rows_too_long_for_one_device_are_divided(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No strategy alone fits: the mesh that is chosen divides rows or layers."""
    monkeypatch.setenv("COLUMNS", "160")
    found = planned({"name": "fsdp2"}, 8, length=65_536, memory=20.0, scale=True)
    eight = [row for row in found.scaled or [] if row["devices"] == 8 and row["fits"]]
    assert eight
    assert all(max(row["mesh"].get("context", 1), row["mesh"].get("tensor", 1)) > 1 for row in eight)
    show(found.search, found.candidates, found.chosen, found.change, Request("r"), found.scaled)
    marked = [line for line in capsys.readouterr().out.splitlines() if "fastest that fits" in line]
    assert any(next(row["strategy"] for row in eight if row["fastest"]) in line for line in marked)


def test_what_a_process_keeps_is_of_the_same_division() -> None:
    """The second plan of a process took the first one's halved layers for its own."""
    whole = planned({"name": "ddp"}, 2).candidates[0].peak
    reuse.keep(4)
    try:
        half = planned({"name": "fsdp2", "mesh": {"tensor": 2}}, 2).candidates[0].peak
        assert planned({"name": "ddp"}, 2).candidates[0].peak == whole > half
    finally:
        reuse.keep(0)


def test_the_fewest_devices_of_a_recipe_with_a_mesh(tmp_path: Path) -> None:
    """Its own division counts where no whole row fits, and the change says so."""
    strategy = {"name": "fsdp2", "mesh": {"context": 8}}
    long = {"gpu": None, "memory": 20.0, "length": 65_536}
    found = planned(strategy, 8, fit=("gpus",), **long).to_json()["fit"][0]
    count = found["answer"]
    assert found["change"].startswith(f"--gpus {count} --nodes 1 strategy.name=fsdp2 ")
    assert "strategy.mesh.context=8" in found["change"]
    roomy = planned({"name": "fsdp2", "mesh": {"tensor": 4}}, 4, fit=("gpus",)).to_json()["fit"][0]
    assert roomy["change"] == "--gpus 1 --nodes 1 strategy.name=single strategy.mesh=null"
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(values(strategy, 8, length=65_536)))
    overrides = tuple(part for part in found["change"].split() if "=" in part)
    again = make_plan(Request(str(file), overrides, gpus=count, memory=20.0))
    assert again.candidates[0].peak == found["peak_bytes"]
    assert again.fits
