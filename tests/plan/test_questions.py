"""``plan --fit``, ``--explain`` and ``--price``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cases import every_case
from plan.cells import LLAMA
from toolkit.errors import InputError
from toolkit.planning.answers import prices_of
from toolkit.planning.command import Planned, Request, make_plan
from toolkit.planning.hardware import devices
from toolkit.planning.questions import largest, repeated, with_layers
from toolkit.planning.screen import screen
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve

SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16, "vocab_size": 32000}
BIG = LLAMA | SIZES | {"max_position_embeddings": 100_000}


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(BIG))
    return str(file)


def planned(config: str, **options: Any) -> Planned:
    return make_plan(Request(config, **({"length": 1024, "memory": 10.0} | options)))


@every_case("limit", [0, 1, 2, 3, 7, 8, 99, 100, 101])
def test_the_largest_that_fits_is_found(limit: int) -> None:
    assert largest(lambda size: size - limit, 100) == min(limit, 100)
    assert largest(lambda size: (size - limit) ** 3, 100, first=50) == min(limit, 100)


def test_the_longest_rows_and_largest_micro_batch_fit_and_the_next_do_not(config: str) -> None:
    found = planned(config, fit=("length", "micro"))
    length, micro = (one["answer"] for one in found.to_json()["fit"])
    search = found.search
    assert length % 64 == 0
    assert 1024 < length < 100_000
    for rows, fits in ((length, True), (length + 64, False)):
        planner = search.planner.of_length(rows)
        assert search.candidate(search.asked, planner=planner).fits == fits
    assert micro > 1
    values = search.asked.recipe.model_dump(exclude_unset=True)
    for size, fits in ((micro, True), (micro + 1, False)):
        batch = {"micro_size": size, "accumulation": search.asked.accumulation}
        variant = resolve(Recipe.model_validate(values | {"batch": batch}), device="cuda")
        assert search.candidate(variant).fits == fits


def test_the_largest_model_of_a_shape_and_the_fewest_devices(config: str) -> None:
    found = planned(config, memory=5.0, fit=("model", "gpus"))
    model, devices_ = found.to_json()["fit"]
    assert not found.fits
    assert 0 < model["answer"] < SIZES["num_hidden_layers"]
    assert model["peak_bytes"] <= model["usable_bytes"]
    assert devices_["answer"] in (2, 4, 8)
    assert f"--gpus {devices_['answer']} --nodes 1 strategy.name={devices_['strategy']}" == devices_["change"]


HYBRID = LLAMA | SIZES | {
    "model_type": "qwen3_next", "num_hidden_layers": 8, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 64,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_key_value_heads": 2,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"] * 2,
}  # fmt: skip
"""Its pattern is not transformers' own, three linear layers in front of each full one."""


@pytest.mark.nightly
@pytest.mark.parametrize("memory", [4.0, 9.0])
def test_fewer_or_more_layers_keep_the_pattern_of_a_hybrid(tmp_path: Path, memory: float) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(HYBRID))
    found = planned(str(file), memory=memory, fit=("model",))
    [one] = found.to_json()["fit"]
    layers = one["answer"]
    assert (layers > 8) == (memory > 5)
    chosen = found.answers.fit[0].candidate.resolved.facts.config  # type: ignore[union-attr]
    assert chosen["layer_types"] == (HYBRID["layer_types"] * layers)[:layers]  # type: ignore[operator,index]
    assert f"model.config.num_hidden_layers={layers} " in f"{one['change']} "
    again = planned(str(file), memory=memory, overrides=tuple(one["change"].split()))
    assert again.candidates[0].peak == one["peak_bytes"]


@every_case(
    ("kinds", "count", "expected"),
    [
        ("llls" * 6 + "ll", 8, "llls" * 2),
        ("llls" * 6 + "ll", 30, ("llls" * 8)[:30]),
        ("dsss", 6, "dsssss"),
        ("ddsese", 8, "ddsesese"),
        ("abcab", 8, "abcababc"),  # nothing repeats for two whole turns: all of it again
        ("a", 3, "aaa"),
    ],
)
def test_a_list_by_layer_goes_on_as_it_does(kinds: str, count: int, expected: str) -> None:
    assert "".join(repeated(kinds, count)) == expected


def test_layers_that_are_named_by_number_follow() -> None:
    config = {"num_hidden_layers": 4, "mlp_only_layers": [1, 3], "no_rope_layers": [1, 1, 1, 0]}
    config["eos_token_id"] = [1, 2, 3, 4]
    more = {"num_hidden_layers": 6, "mlp_only_layers": [1, 3, 5], "no_rope_layers": [1, 1, 1, 0, 1, 1]}
    assert with_layers(config, 6) == config | more


def test_the_cheapest_device_that_fits_needs_no_device(config: str) -> None:
    [free] = planned(config, memory=None, fit=("gpu",)).to_json()["fit"]
    assert free["change"] == f"--gpu {free['answer']}"
    fitting = [d for d in devices().values() if d.memory >= devices()[free["answer"]].memory]
    assert len(fitting) > 1
    prices = ("h100=1", "a100-80gb=1000")
    [priced] = planned(config, memory=None, fit=("gpu",), price=prices).to_json()["fit"]
    assert priced["answer"] == "h100"
    assert priced["cost_per_step"] == pytest.approx(priced["seconds_per_step"] / 3600 * priced["devices"])


def test_a_price_gives_the_cost_of_the_chosen(config: str) -> None:
    document = planned(config, memory=None, gpu="h100", gpus=2, price=("3.6",)).to_json()
    chosen = document["candidates"][document["chosen"]]
    assert document["cost"]["step"] == pytest.approx(chosen["seconds_per_step"] * 0.001 * 2)
    assert document["cost"]["run"] == pytest.approx(500 * document["cost"]["step"])
    assert planned(config, price=("3.6",)).to_json()["cost"] is None  # a device with unknown rates


def test_a_run_of_epochs_has_no_price_of_its_own(config: str) -> None:
    run = ("run.max_steps=null", "run.epochs=1")
    found = planned(config, memory=None, gpu="h100", gpus=2, price=("3.6",), overrides=run)
    assert set(found.to_json()["cost"]) == {"step", "million_tokens"}
    assert not any("for the run" in line for line in found.answers.lines())


def test_an_explanation_says_how_long_a_step_of_longer_rows_takes(config: str) -> None:
    device: dict[str, Any] = {"memory": None, "gpu": "a100-80gb", "micro": 8}
    found = planned(config, explain=True, **device)
    twice = planned(config, **device | {"length": 2048}).to_json()["candidates"][0]["seconds_per_step"]
    assert found.to_json()["explain"]["seconds_twice_as_long"] == pytest.approx(twice)
    own = found.to_json()["candidates"][0]["seconds_per_step"]
    (line,) = [line for line in found.answers.lines() if line.startswith("rows twice as long")]
    assert line == f"rows twice as long: {twice:.2f} s a step, {twice / own / 2:.2f} times the time of a token"
    assert planned(config, explain=True).to_json()["explain"]["seconds_twice_as_long"] is None


def test_an_explanation_says_where_the_bytes_are(config: str) -> None:
    found = planned(config, memory=2.0, explain=True)
    explained = found.to_json()["explain"]
    assert sum(explained["breakdown"].values()) == explained["peak_bytes"]
    assert explained["bytes_per_token"] > 0
    assert explained["bytes_per_row"] >= 1024 * explained["bytes_per_token"] * 0.5
    assert found.answers is not None
    assert found.answers.lines()[-1].startswith("why it does not fit:")


@every_case(
    ("options", "message"),
    [
        ({"fit": ("lengths",)}, "--fit lengths: not one of length, micro, gpus, gpu, model"),
        ({"price": ("cheap",)}, "--price cheap: a number, or NAME=NUMBER"),
        ({"price": ("h100=-1",)}, "--price h100=-1: must be above 0"),
        ({"price": ("h900=1",)}, "--price h900=1: h900 is not in the table of devices"),
    ],
)
def test_what_cannot_be_asked_is_an_error(config: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        planned(config, **options)


def test_devices_are_no_question_for_a_cpu(config: str) -> None:
    with pytest.raises(InputError, match="--fit gpus: the recipe is for a CPU"):
        make_plan(Request(config, ("machine.device=cpu", "precision=fp32"), length=64, fit=("gpus",)))


def test_a_price_without_a_name_is_of_the_device() -> None:
    assert prices_of(["2.5", "H100=4"], "16 GiB", devices()) == {"16 GiB": 2.5, "h100": 4.0}


def test_what_fits_by_the_expected_value_is_beside_the_answer_by_the_upper_end(tmp_path: Path) -> None:
    """The number is from a line through two sizes: the plan of it expects what is usable, to a twentieth."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA | {"max_position_embeddings": 1 << 20}))
    plan = make_plan(Request(str(file), memory=2.0, fit=("length",), cache=False))
    [row] = plan.to_json()["fit"]
    assert row["expected_answer"] > row["answer"]
    assert f"about {row['expected_answer']:,} by its expected value" in row["text"]
    search = plan.search
    longer = search.candidate(search.asked, planner=search.planner.of_length(row["expected_answer"]))
    assert not longer.fits
    assert longer.expected == pytest.approx(longer.usable, rel=0.05)
    told = " ".join(screen(search, [longer], None, None, Request(str(file)), None, columns=200))
    assert "only the upper end of the interval does not fit" in told
    assert "only the upper end" not in " ".join(
        screen(search, [plan.candidates[0]], None, None, Request(str(file)), None, columns=200)
    )
