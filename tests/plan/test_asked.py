"""Questions about a model without a recipe, as they are asked: one command line each, without network."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from cases import every_case
from plan.cells import LLAMA
from toolkit.__main__ import main
from toolkit.command_line import tokens_option
from toolkit.errors import InputError
from toolkit.planning.command import Request, make_plan
from toolkit.planning.hardware import devices
from toolkit.recipe.shapes import shape_of

SEVEN, EIGHT, SEVENTY = "mistralai/Mistral-7B-v0.3", "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B"
PRICES = {"h100": 3.0, "h200": 40.0, "b200": 60.0, "a100-80gb": 1.6, "l40s": 0.9}


def asked(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    """The JSON and the screen of ``toolkit plan`` with the words of ``line``."""
    file = tmp_path / "plan.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["toolkit", "plan", *shlex.split(line), "--json", str(file)])
        patch.setenv("TOOLKIT_PLAN_CACHE", str(tmp_path / "plans"))
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code in (0, 1)
    return json.loads(file.read_text()), " ".join(capsys.readouterr().out.split())


def of_replay(model: str, change: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The recipe's own candidate in the plan that the answer's ``change`` asks for."""
    return asked(f"{model} {change}", tmp_path, capsys)[0]["candidates"][0]  # type: ignore[no-any-return]


@pytest.mark.nightly
def test_the_five_questions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """... and what each answer proposes is planned as it says, and what is next to it does not fit."""
    prices = tmp_path / "prices.yaml"
    prices.write_text(yaml.safe_dump(PRICES))

    document, screen = asked(f"{SEVEN} --full --fit gpu --price {prices}", tmp_path, capsys)
    [which] = document["fit"]
    assert which["devices"] > 1, "several smaller ones cost less than an h200 at these prices"
    assert which["answer"] in ("h100", "a100-80gb", "l40s")
    assert f"{which['devices']} × {which['answer']} under {which['strategy']}" in screen
    assert f"planned with the sizes that {SEVEN} publishes" in screen
    own = of_replay(SEVEN, which["change"], tmp_path, capsys)
    assert own["fits"]
    assert own["seconds_per_step"] == pytest.approx(which["seconds_per_step"])
    assert which["cost_per_step"] == pytest.approx(
        own["seconds_per_step"] / 3600 * which["devices"] * PRICES[which["answer"]]
    )

    document, _ = asked(f"{EIGHT} --qlora 16 --memory 24 --fit length", tmp_path, capsys)
    [rows] = document["fit"]
    device = f"{EIGHT} --qlora 16 --memory 24"
    assert of_replay(device, rows["change"], tmp_path, capsys)["fits"]
    assert not of_replay(device, f"data.max_length={rows['answer'] + 64}", tmp_path, capsys)["fits"]

    device = f"{SEVENTY} --qlora 16 --gpu rtxa6000 --gpus 2"
    document, screen = asked(f"{device} --fit length", tmp_path, capsys)
    [longest] = document["fit"]
    assert longest["strategy"] == "fsdp2"
    assert "under fsdp2" in screen
    assert of_replay(device, longest["change"], tmp_path, capsys)["fits"]
    named, _ = asked(f"{device} --fit length strategy.name=zero2", tmp_path, capsys)
    assert (named["fit"][0]["answer"] or 0) < longest["answer"], "a strategy that is asked for stays"
    longer = f"--length {longest['answer'] + 64} --all"
    others = asked(f"{device} {longer}", tmp_path, capsys)[0]["candidates"]
    same = [c for c in others if (c["offload"], c["micro_size"], c["activation_checkpointing"]) == ("none", 1, "full")]
    assert {c["strategy"] for c in same} >= {"zero3", "fsdp1", "fsdp2"}
    assert not any(c["fits"] for c in same)

    document, screen = asked(f"{SEVENTY} --lora 16 --gpu h100 --fit gpus", tmp_path, capsys)
    [several] = document["fit"]
    assert several["answer"] == several["devices"]
    shown = re.search(rf"{several['answer']} × h100 under {several['strategy']}, ([\d.]+) of", screen)
    assert shown
    assert 140 / several["answer"] < float(shown[1]) < 79.1

    document, screen = asked(f"{EIGHT} --lora 16 --gpu h100 --price 2.5 --tokens 10M --epochs 3", tmp_path, capsys)
    run = document["run"]
    assert (run["epochs"], run["steps"]) == (3, 3 * 611)  # 9,766 rows of 1,024 tokens, 16 a step
    chosen = document["candidates"][document["chosen"]]
    assert run["seconds"] == pytest.approx(1833 * chosen["seconds_per_step"])
    assert document["cost"]["run"] == pytest.approx(run["seconds"] / 3600 * 2.5)
    assert "3 epochs over 10,000,000 tokens in full rows, 1,833 steps" in screen


def test_the_longest_rows_are_of_the_strategy_that_takes_them(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA | {"hidden_size": 512, "num_hidden_layers": 4, "max_position_embeddings": 10**6}))
    options: dict[str, Any] = {"memory": 2.5, "gpus": 2, "length": 512, "fit": ("length",)}
    [free] = make_plan(Request(str(file), **options)).to_json()["fit"]
    for name in ("zero2", "fsdp2"):
        [own] = make_plan(Request(str(file), (f"strategy.name={name}",), **options)).to_json()["fit"]
        assert own["strategy"] in (name, None)
        assert (own["answer"] or 0) < free["answer"] or name == free["strategy"]
    assert free["strategy"] != "zero2", "which a model on two devices has at first"
    assert free["change"] == f"data.max_length={free['answer']} strategy.name={free['strategy']}"


def test_without_prices_the_fewest_and_several_smaller_ones_are_named(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA | {"hidden_size": 4096, "num_hidden_layers": 16, "intermediate_size": 14336}))
    found = make_plan(Request(str(file), fit=("gpu",), length=1024))
    [one] = found.to_json()["fit"]
    assert one["devices"] == 1
    several = re.search(r"several smaller ones: 2 × (\S+) under (\S+?),", one["text"])
    assert several
    assert devices()[several[1]].memory < devices()[one["answer"]].memory
    again = make_plan(Request(str(file), (f"strategy.name={several[2]}",), gpu=several[1], gpus=2, length=1024))
    assert again.fits
    fixed = make_plan(Request(str(file), fit=("gpu",), gpus=2, length=1024)).to_json()["fit"][0]
    assert fixed["devices"] == 2, "a number that is asked for stays"


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    values = {"model": {"config": LLAMA}, "data": {"train": "t.jsonl"}, "run": {"max_steps": 40}}
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(values))
    return str(file)


@every_case(
    ("overrides", "expected", "notes"),
    [
        (("run.epochs=3",), (None, 3), ["run.max_steps: {has} gives way to run.epochs=3"]),
        (("run.epochs=3", "run.max_steps=null"), (None, 3), []),
        (("run.max_steps=7",), (7, None), []),
        ((), None, []),
    ],
)
def test_epochs_of_the_command_line_count_in_place_of_steps(
    tmp_path: Path, recipe: str, overrides: tuple[str, ...], expected: tuple[Any, Any] | None, notes: list[str]
) -> None:
    model = tmp_path / "config.json"
    model.write_text(json.dumps(LLAMA))
    for source, has in ((recipe, 40), (str(model), 500)):
        found = make_plan(Request(source, overrides, gpu="h100", length=64))
        run = found.search.asked.recipe.run
        assert (run.max_steps, run.epochs) == (expected or (has, None))
        assert [note for note in found.search.notes() if "gives way" in note] == [one.format(has=has) for one in notes]


@every_case(
    ("more", "options", "message"),
    [
        ((), {"lora": 8, "qlora": 8}, "--lora and --qlora: one of them"),
        ((), {"full": True, "qlora": 8}, "--qlora and --full: one of them"),
        ((), {"qlora": 0}, "--qlora 0: the rank of an adapter must be at least 1"),
        ((), {"epochs": 0}, "--epochs 0: must be at least 1"),
        ((), {"price": ("missing.yaml",)}, r"missing\.yaml"),
        (("run.max_steps=9",), {"tokens": 100}, "--tokens: the run has max_steps: 9; say with --epochs"),
    ],
)
def test_what_contradicts_itself_is_an_error(
    tmp_path: Path, more: tuple[str, ...], options: dict[str, Any], message: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    with pytest.raises(InputError, match=message):
        make_plan(Request(str(file), more, gpu="h100", length=64, **options))


@every_case(("flag", "key"), [("qlora", "adapter.method=qlora adapter.r=16"), ("full", "adapter=null")])
def test_a_recipe_says_itself_what_is_trained(recipe: str, flag: str, key: str) -> None:
    with pytest.raises(InputError, match=f"--{flag}: for a model; with a recipe use {key}"):
        make_plan(Request(recipe, gpu="h100", **{flag: 1}))  # type: ignore[arg-type]


@every_case(("text", "value"), [("10M", 10**7), ("1.5b", 15 * 10**8), ("12,000", 12000), ("3 T", 3 * 10**12)])
def test_tokens_have_a_unit(text: str, value: int) -> None:
    assert tokens_option(text) == value


@every_case("text", ["0", "many", "-3", "10MB"])
def test_tokens_are_a_count(text: str) -> None:
    with pytest.raises(InputError, match="--tokens"):
        tokens_option(text)


def test_a_written_recipe_has_the_model_not_its_sizes(tmp_path: Path) -> None:
    target = tmp_path / "out.yaml"
    make_plan(Request("HuggingFaceTB/SmolLM2-135M", lora=8, gpu="h100", length=64, output=str(target)))
    written = yaml.safe_load(target.read_text())["model"]
    assert (written["path"], "config" in written) == ("HuggingFaceTB/SmolLM2-135M", False)


@every_case(
    ("model", "billions"),
    [
        (SEVEN, 7.248), (EIGHT, 8.030), ("meta-llama/Llama-3.2-1B", 1.236), ("Qwen/Qwen2.5-7B-Instruct", 7.616),
        ("HuggingFaceTB/SmolLM2-135M", 0.1345), ("Qwen/Qwen3-0.6B", 0.596), ("Qwen/Qwen3-32B", 32.762),
        ("Qwen/Qwen2.5-72B", 72.706), ("meta-llama/Llama-2-13b-hf", 13.016), ("mistralai/Mixtral-8x7B-v0.1", 46.703),
    ],
)  # fmt: skip
def test_published_sizes_make_the_published_number_of_weights(model: str, billions: float) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = shape_of(model)
    assert shape is not None
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape))
    assert built.num_parameters() / 1e9 == pytest.approx(billions, rel=0.001)
