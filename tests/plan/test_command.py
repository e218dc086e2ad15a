"""`toolkit plan` as a user meets it: exit status, JSON, the suggested change, refusals."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from cases import every_case
from nights import nightly_but
from plan.cells import LLAMA
from plan.test_speed import LLAMA_8B
from toolkit.__main__ import main
from toolkit.errors import InputError
from toolkit.planning.command import Request, plan_command

BIG = LLAMA | {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16, "vocab_size": 32000}
FIELDS = {
    "strategy", "offload", "activation_checkpointing", "micro_size", "fits", "peak_bytes", "host_bytes", "breakdown",
    "peak_phase", "seconds_per_step", "reason", "asked",
}  # fmt: skip
TERMS = {"parameters", "gradients", "optimizer", "activations", "loss", "communication", "reserve"}


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(BIG))
    return str(file)


def planned(tmp_path: Path, config: str, **options: Any) -> tuple[int, dict[str, Any]]:
    target = tmp_path / "plan.json"
    status = plan_command(Request(config, json_target=str(target), **({"length": 1024} | options)))
    return status, json.loads(target.read_text())


def test_what_fits_exits_0_and_says_all_that_the_contract_names(tmp_path: Path, config: str) -> None:
    status, result = planned(tmp_path, config, gpu="h100", gpus=2)
    assert status == 0
    assert {"schema", "command", "recipe_sha256", "versions", "device", "started", "seconds"} <= set(result)
    asked = [c for c in result["candidates"] if c["asked"]]
    assert len(asked) == 1
    for candidate in result["candidates"]:
        assert set(candidate) >= FIELDS
        assert set(candidate["breakdown"]) == TERMS
        assert sum(candidate["breakdown"].values()) == candidate["peak_bytes"]
        assert candidate["peak_bytes"] == max(candidate["phases"].values())
    chosen = result["candidates"][result["chosen"]]
    fitting = [c["seconds_per_step"] for c in result["candidates"] if c["fits"]]
    assert chosen["fits"]
    assert chosen["seconds_per_step"] == pytest.approx(min(fitting), rel=0.01)
    assert {c["strategy"] for c in result["candidates"]} == {"ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2"}


def test_a_recipe_for_one_process_is_planned_on_several_devices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recipe that `toolkit init` writes without a GPU, and the line of README and the quick start after it."""
    recipe = {
        "model": {"config": LLAMA}, "data": {"train": "train.jsonl", "max_length": 128}, "strategy": {"name": "single"},
        "machine": {"device": "auto", "processes": 1}, "run": {"max_steps": 2},
    }  # fmt: skip
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    status, result = planned(tmp_path, str(file), gpu="h100", gpus=2, length=None)
    assert status == 0
    [asked] = [candidate for candidate in result["candidates"] if candidate["asked"]]
    assert asked["strategy"] == "ddp"
    note = "single runs in one process; planned with strategy.name: ddp"
    assert note in result["assumptions"]
    assert note in capsys.readouterr().out
    status, result = planned(tmp_path, str(file), gpu="h100", gpus=1, length=None)
    assert (status, [one["strategy"] for one in result["candidates"] if one["asked"]]) == (0, ["single"])
    with pytest.raises(InputError, match=r"strategy\.name: single runs in one process"):
        planned(tmp_path, str(file), gpu="h100", gpus=2, length=None, overrides=("strategy.name=single",))


@pytest.mark.parametrize(
    ("lora", "memory", "message"),
    nightly_but(
        [
            (None, 5.0, "with 8-bit moments"),
            (None, 2.5, "an adapter instead of all weights"),
            (8, 1.25, "on a 4-bit base"),
        ],
        (None, 5.0, "with 8-bit moments"),
    ),
)
def test_where_nothing_that_was_asked_fits_training_something_else_is_suggested(
    tmp_path: Path, config: str, lora: int | None, memory: float, message: str
) -> None:
    """... and what is suggested then fits."""
    pytest.importorskip("bitsandbytes")
    status, result = planned(tmp_path, config, memory=memory, gpus=1, lora=lora, length=256)
    assert status == 1
    assert message in result["smallest_change"]
    assert not any(c["fits"] for c in result["candidates"])
    overrides = tuple(part for part in result["smallest_change"].split(" (")[0].split() if "=" in part)
    status, result = planned(tmp_path, config, memory=memory, gpus=1, length=256, overrides=overrides)
    assert status == 0


def test_what_does_not_fit_exits_1_with_the_change_that_helps(tmp_path: Path, config: str) -> None:
    status, result = planned(tmp_path, config, memory=4.5, gpus=2, micro=4)
    asked = next(c for c in result["candidates"] if c["asked"])
    assert status == 1
    assert not asked["fits"]
    assert "of 4.5 GiB" in asked["reason"]
    key, _, value = result["smallest_change"].split(" ")[0].partition("=")
    assert key in ("batch.micro_size", "strategy.name", "strategy.offload", "activation_checkpointing")
    overrides = tuple(part for part in result["smallest_change"].split(" (")[0].replace(",", "").split())
    again, _ = planned(tmp_path, config, memory=4.5, gpus=2, micro=4, overrides=overrides)
    assert again == 0
    assert value


def test_a_length_that_fits_is_found_where_nothing_else_helps(tmp_path: Path, config: str) -> None:
    # the fused loss, which would do, is refused under fp16
    overrides = ("batch.accumulation=1", "precision=fp16")
    status, result = planned(tmp_path, config, memory=3.3, lora=8, length=8192, overrides=overrides)
    assert status == 1
    assert result["smallest_change"].startswith("data.max_length=")


def test_the_loss_without_logits_is_offered_where_it_helps(tmp_path: Path, config: str) -> None:
    status, result = planned(tmp_path, config, memory=3.3, lora=8, length=8192, overrides=("batch.accumulation=1",))
    assert status == 1
    assert result["smallest_change"].startswith("loss=fused (-")
    chosen = result["candidates"][result["chosen"]]
    assert chosen["loss"] == "fused"
    overrides = ("batch.accumulation=1", "loss=fused")
    again, fused = planned(tmp_path, config, memory=3.3, lora=8, length=8192, overrides=overrides)
    assert again == 0
    assert fused["candidates"][0]["peak_bytes"] == chosen["peak_bytes"]


def test_shorter_packed_rows_keep_the_tokens_of_a_step(tmp_path: Path, config: str) -> None:
    """The mask that keeps samples apart is the square of a row."""
    overrides = ("batch.accumulation=1", "data.packing=true", "loss=fused", "activation_offload=true")
    options = {"memory": 2.5, "lora": 8, "length": 8192}
    status, result = planned(tmp_path, config, overrides=overrides, **options)
    assert status == 1
    change = result["smallest_change"].split(" (")[0].split()
    assert [word.split("=")[0] for word in change] == ["data.max_length", "batch.micro_size"], change
    length, micro = (int(word.split("=")[1]) for word in change)
    assert length * micro == 8192
    again, _ = planned(tmp_path, config, overrides=(*overrides, *change), **(options | {"length": None}))
    assert again == 0


def test_packed_rows_are_reported_to_be_full(tmp_path: Path, config: str, capsys: pytest.CaptureFixture[str]) -> None:
    peaks = []
    for packing in ("false", "true"):
        overrides = (f"data.packing={packing}", "batch.micro_size=2", "activation_checkpointing=none")
        _, result = planned(tmp_path, config, gpu="h100", lora=8, overrides=overrides)
        peaks.append(result["candidates"][0]["peak_bytes"])
    # Each of 16 layers keeps the mask as a bias in 16 bits, one for all heads.
    assert peaks[1] - peaks[0] > 16 * 2 * 1024**2 * 2
    assert result["candidates"][0]["tokens_per_micro_batch"] == 2048
    assert any("2,048 tokens per micro-batch" in line for line in result["assumptions"])
    assert "packed rows of 1024, 2,048 tokens per micro-batch" in " ".join(capsys.readouterr().out.split())


def test_the_chosen_recipe_is_written_and_loads(tmp_path: Path, config: str) -> None:
    from toolkit.recipe.load import load_recipe

    target = tmp_path / "recipe.yaml"
    _, result = planned(tmp_path, config, gpu="h100", gpus=2, output=str(target))
    chosen = result["candidates"][result["chosen"]]
    recipe = load_recipe(target)
    assert recipe.strategy.name == chosen["strategy"]
    assert recipe.batch.micro_size == chosen["micro_size"]
    assert plan_command(Request(str(target), gpu="h100", json_target=str(tmp_path / "x.json"))) == 0


def test_more_devices_take_less_memory_each_where_state_is_split(tmp_path: Path, config: str) -> None:
    peaks = []
    for gpus in (2, 8):
        _, result = planned(tmp_path, config, gpu="h100", gpus=gpus, overrides=("strategy.name=fsdp2",))
        peaks.append(result["candidates"][0]["peak_bytes"])
    assert peaks[1] < peaks[0]


def test_a_user_adds_a_device(tmp_path: Path, config: str) -> None:
    table = tmp_path / "gpus.yaml"
    table.write_text(yaml.safe_dump({"mine": {"memory": 12, "bf16": 50, "bandwidth": 400, "link": 8, "pcie": 8}}))
    status, result = planned(tmp_path, config, gpu="mine", gpu_table=str(table), gpus=2)
    assert result["device"] == "mine"
    assert status in (0, 1)
    assert result["usable_bytes"] == 12 * 2**30


@pytest.mark.nightly
def test_on_paper_to_1024_devices_communication_takes_over(tmp_path: Path, config: str) -> None:
    _, result = planned(tmp_path, config, gpu="h100", gpus=8, link=25.0, scale=True)
    rows = [r for r in result["scale"] if r["strategy"] == "zero3"]
    assert [r["devices"] for r in rows] == [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    assert rows[-1]["waiting"] > rows[2]["waiting"]
    # Bytes of a parameter between two nodes and in a micro-batch: copies add up float32 gradients, 4; sharded over all
    # 16 devices there are two gathers of 2 bytes beside it, 15/16 of 8.
    waits = {r["strategy"]: r["seconds"] * r["waiting"] for r in result["scale"] if r["devices"] == 16}
    assert waits["fsdp2 hybrid"] < 0.6 * waits["fsdp2"]


@every_case(
    ("options", "said"),
    [
        ({"gpu": "h1000"}, "did you mean h100"),
        ({"gpu": "quantum"}, "not in the table. Known: b200"),
        ({}, "--gpu: the device is not set"),
        ({"gpu": "h100", "gpus": 0}, "at least 1"),
        ({"gpu": "h100", "gpus": 8, "nodes": 1000}, "at most 1024"),
        ({"memory": -1.0}, "above 0"),
        ({"gpu": "h100", "headroom": 1.5}, "fraction"),
        ({"gpu": "h100", "lora": 0}, "rank"),
        ({"gpu": "h100", "gpu_table": "no-such-file.yaml"}, "no-such-file.yaml"),
        ({"gpu": "h100", "overrides": ("strategy.name=zero9",)}, "zero9"),
    ],
)
def test_what_cannot_be_used_is_refused(tmp_path: Path, config: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        planned(tmp_path, config, **options)


def test_a_model_whose_config_cannot_be_had_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="config"):
        plan_command(Request("nobody/has-this-model", gpu="h100"))


def test_an_unknown_kind_of_model_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "no_such_model", "hidden_size": 8}))
    with pytest.raises(InputError):
        plan_command(Request(str(file), gpu="h100"))


@pytest.mark.usefixtures("launches")
def test_help_imports_nothing_heavy() -> None:
    import subprocess
    import sys

    code = "import sys, toolkit.planning.options; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_fits_in_shares_alone_is_loaded_in_shares(tmp_path: Path) -> None:
    """DeepSpeed left to itself moves a model whole to each device before it splits it; ours is split already."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    found = {}
    for name in ("zero3", "fsdp2"):
        overrides = (f"strategy.name={name}",)
        file = str(tmp_path / "config.json")
        _, result = planned(tmp_path, file, memory=14, gpus=8, lora=8, length=128, overrides=overrides)
        found[name] = result["candidates"][0]
    weights = 2 * 8.03e9  # 16 bits
    largest = 2 * 128_256 * 4096  # the embedding
    for name in found:
        load = found[name]["phases"]["load"] - found[name]["breakdown"]["reserve"]
        assert weights / 8 < load < weights / 8 + 1.1 * largest, name
        assert found[name]["fits"]


def test_the_host_loads_trained_weights_for_every_process_and_frozen_ones_once(tmp_path: Path, config: str) -> None:
    sizes = {}
    for lora in (None, 8):
        for gpus in (1, 4):
            _, result = planned(tmp_path, config, gpu="h100", gpus=gpus, lora=lora)
            sizes[lora, gpus] = result["candidates"][0]["host_load_bytes"]
    assert sizes[None, 4] == 4 * sizes[None, 1]
    assert sizes[8, 4] < 1.1 * sizes[8, 1]
    assert sizes[8, 1] == pytest.approx(0.5 * sizes[None, 1], rel=0.05)


@pytest.mark.nightly
def test_a_strategy_that_shards_weights_loads_no_whole_model(
    tmp_path: Path, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def of_host(strategy: str, *overrides: str, lora: int | None = None) -> float:
        overrides = (f"strategy.name={strategy}", *overrides)
        _, result = planned(tmp_path, config, gpu="h100", gpus=4, lora=lora, overrides=overrides)
        return float(result["candidates"][0]["host_load_bytes"])

    whole = of_host("zero2")
    for strategy in ("zero3", "fsdp1", "fsdp2"):
        assert of_host(strategy) < 0.8 * whole, strategy  # a tiny model: its embedding is a large part of it
        # One weight at a time is drawn in float32, whatever trains; an adapter and the cast to 16 bits come on top.
        assert of_host(strategy) < of_host(strategy, lora=8) < 1.4 * of_host(strategy), strategy
    assert of_host("fsdp2", "adapter.method=dora", lora=8) == of_host("zero2", "adapter.method=dora", lora=8)
    assert "host memory of a node while its processes load: " in capsys.readouterr().out


@pytest.mark.nightly
def test_what_was_never_measured_is_marked(tmp_path: Path, config: str, capsys: pytest.CaptureFixture[str]) -> None:
    def unmeasured(*overrides: str) -> list[str]:
        _, result = planned(tmp_path, config, gpu="h100", gpus=2, overrides=overrides)
        found: list[str] = result["candidates"][0]["unmeasured"]
        return found

    assert unmeasured("precision=fp16", "strategy.name=fsdp1", "strategy.offload=all") == ["offload all", "fp16"]
    assert "offload all, fp16: not validated" in capsys.readouterr().out
    assert unmeasured("strategy.offload=optimizer") == []  # ZeRO's is
    assert unmeasured("model.task=token-classification", "data.format=tokens") == ["token-classification"]
    assert unmeasured() == []


MESH_RECIPE = """
model: {config: {model_type: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2,
                 num_attention_heads: 4, num_key_value_heads: 2, vocab_size: 500}}
tokenizer: {path: none}
data: {train: none, max_length: 64}
precision: bf16
strategy: {name: fsdp2, mesh: {replicate: 4, shard: 8}}
machine: {device: cuda, processes: 8, nodes: 4}
run: {max_steps: 2}
"""


def test_a_mesh_is_planned_beside_the_strategies_without_one(tmp_path: Path) -> None:
    """The recipe's own candidate has its mesh; the others one group of all ranks, as `strategy.mesh=null` gives it."""
    from toolkit.planning.choice import _describe, _differences
    from toolkit.planning.hardware import device_named
    from toolkit.planning.search import Search
    from toolkit.planning.time import Rates
    from toolkit.recipe.load import load_recipe
    from toolkit.strategies import resolve

    file = tmp_path / "recipe.yaml"
    file.write_text(MESH_RECIPE)
    asked = resolve(load_recipe(file), str(file), device="cuda")
    search = Search(asked, device_named("h100", None), 0.05, Rates())
    found = search.all(every=True)
    own = found[0].as_json()
    assert (own["asked"], own["mesh"], set(own["sent_bytes"])) == (
        True,
        {"replicate": 4, "shard": 8},
        {"shard", "replicate"},
    )
    assert "mesh 4 x 8" in found[0].label
    alike = [c for c in found if c.label.replace(" mesh 4 x 8", "") == found[0].label.replace(" mesh 4 x 8", "")]
    assert [c.resolved.mesh.shard for c in alike] == [8, 32]
    assert alike[1].peak < alike[0].peak
    assert alike[0].sent["replicate"] < alike[1].sent["all"] / 8
    assert {c.resolved.mesh.shard for c in found if c.resolved.recipe.strategy.name == "zero3"} == {32}
    other = next(c for c in found if c.resolved.recipe.strategy.name == "zero2")
    changes = [_describe(name, other) for name in _differences(found[0], other)]
    assert {"strategy.name=zero2", "strategy.mesh=null"} <= set(changes)


def test_a_sync_of_the_recipe_is_its_strategys_alone(tmp_path: Path) -> None:
    """Strategies that cannot sum gradients then are planned, measured and tried without it."""
    from toolkit.benchmark.cells import make_cells
    from toolkit.planning.choice import _describe, _differences
    from toolkit.planning.hardware import device_named
    from toolkit.planning.search import Search
    from toolkit.planning.time import Rates
    from toolkit.recipe.load import load_recipe
    from toolkit.strategies import resolve
    from toolkit.verification.matrix import with_strategy

    file = tmp_path / "recipe.yaml"
    batch = "batch: {micro_size: 2, accumulation: 4}\n"
    file.write_text(MESH_RECIPE.replace("mesh: {replicate: 4, shard: 8}", "sync: last") + batch)
    asked = resolve(load_recipe(file), str(file), device="cuda")
    assert asked.recipe.strategy.sync == "last"
    search = Search(asked, device_named("h100", None), 0.05, Rates())
    found = search.all(every=True)
    assert "sync last" in found[0].label
    assert {"ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2"} == {c.resolved.recipe.strategy.name for c in found}
    alike = [c for c in found if c.label.replace(" sync last", "") == found[0].label.replace(" sync last", "")]
    assert [c.resolved.recipe.strategy.sync for c in alike] == ["last", None]
    assert alike[1].peak < alike[0].peak, "parts of gradients take less than whole ones"
    other = next(c for c in found if c.resolved.recipe.strategy.name == "zero2")
    assert {"strategy.name=zero2", "strategy.sync=null"} <= {_describe(n, other) for n in _differences(found[0], other)}
    overrides = ["machine.device=cpu", "machine.processes=2", "machine.nodes=1"]
    cells, left_out = make_cells(str(file), overrides, ["zero2", "fsdp1"], [], None)
    assert [cell.resolved.recipe.strategy.sync for cell in cells] == ["last", None, None], left_out
    assert with_strategy(asked, "zero2", 2).recipe.strategy.sync is None


@every_case(
    ("change", "said"),
    [
        pytest.param({"hidden_size": None, "intermediate_size": None}, "it has no width (hidden_size)", id="no width"),
        pytest.param({"num_hidden_layers": None}, "it has no number of layers (num_hidden_layers)", id="no layers"),
        pytest.param({"model_type": "no_such"}, "Unrecognized model identifier: no_such.", id="no such architecture"),
        pytest.param(
            {"num_attention_heads": 7},
            "Class validation error for validator 'validate_architecture': ",
            id="sizes that do not go together",
        ),
    ],
)
def test_a_config_that_no_plan_can_be_made_of_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({key: value for key, value in (BIG | change).items() if value is not None}))
    with pytest.raises(InputError) as refused:
        plan_command(Request(str(file), gpu="h100", length=1024))
    assert said in str(refused.value)
    assert len(str(refused.value)) - len(str(file)) < 200
    assert refused.value.exit_code == 2


def test_host_memory_is_planned_for_and_a_size_may_have_a_unit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not a size, or no device, says what to type."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))

    def said(*arguments: str) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["toolkit", "plan", str(file), *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code or 0, *capsys.readouterr()

    for words, usable, strategies in (
        (["--gpu", "cpu", "--memory", "8GiB"], 0.95 * 8 * 2**30, {"single"}),
        (
            ["--gpu", "CPU", "--memory", "8 g", "--gpus", "2"],
            0.95 * 4 * 2**30,
            {"ddp", "zero1", "zero2", "zero3", "fsdp2"},
        ),
        (["--gpu", "cpu"], 0.95 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), {"single"}),
        (["--memory", "8GB"], 8e9, {"single"}),
    ):
        code, out, err = said(*words, "--json", "-")
        assert code == 0, err
        document = json.loads(out)
        assert document["usable_bytes"] == pytest.approx(usable, rel=1e-6), words
        assert (document["device"] == "cpu") == ("--gpu" in words)
        assert {one["strategy"] for one in document["candidates"]} >= strategies
    for words, message in (
        (["--memory", "8 apples"], "--memory 8 apples: expected GiB, for example 8 or 8GiB"),
        (["--memory", "-1GiB"], "--memory -1GiB: expected GiB, for example 8 or 8GiB"),
        (["--gpu", "laptop"], "For another device: --memory GIB, or --gpu-table FILE; for host memory: --gpu cpu"),
        ([], "--gpu cpu for host memory"),
    ):
        code, out, err = said(*words)
        assert (code, out) == (2, ""), words
        assert message in err
    for line in said("--gpu", "cpu", "--memory", "8")[1].splitlines():
        assert "GPU" not in line


def test_flash_attention_has_no_kernels_of_32_bits(tmp_path: Path, config: str) -> None:
    """It was planned as plain attention, whose scores are the square of a row."""
    with pytest.raises(InputError, match=r"model\.attention: flash_attention_2 has kernels of 16 bits alone"):
        planned(tmp_path, config, gpu="h100", overrides=("model.attention=flash_attention_2", "precision=fp32"))
    _, result = planned(tmp_path, config, gpu="h100", overrides=("model.attention=flash_attention_2",))
    _, plain = planned(tmp_path, config, gpu="h100")
    assert result["candidates"][0]["peak_bytes"] == pytest.approx(plain["candidates"][0]["peak_bytes"], rel=0.01)
