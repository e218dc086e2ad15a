"""`toolkit import` of parallelism_config and AutoTP: `strategy.mesh`, or the reason by key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from cases import every_case
from toolkit import import_config

TRL = {"model_name_or_path": "org/model", "dataset_name": "org/data", "packing": False}
FSDP2 = "distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config: {fsdp_version: 2}\n"
FSDP1 = "distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config: {fsdp_version: 1}\n"
DDP = "distributed_type: MULTI_GPU\nmixed_precision: bf16\n"


def zero(stage: int) -> str:
    return f"distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config: {{zero_stage: {stage}}}\n"


def of(folder: Path, config: str, *overrides: str, processes: int | None = 8, **sizes: Any) -> Any:
    text = config + (f"num_processes: {processes}\n" if processes else "")
    section = {f"parallelism_config_{key}": value for key, value in sizes.items()}
    (folder / "accelerate.yaml").write_text(text + yaml.safe_dump({"parallelism_config": section}, sort_keys=False))
    (folder / "sft.yaml").write_text(yaml.safe_dump(TRL))
    return import_config([folder / "sft.yaml", folder / "accelerate.yaml"], ["data.format=text", *overrides])


def strategy(made: Any) -> Any:
    assert made.recipe is not None, made.blocks
    return made.recipe.model_dump(mode="json", exclude_unset=True)["strategy"]


AUTOTP: list[tuple[int, int, int, dict[str, int] | None]] = [
    (1, 4, 2, {"tensor": 2, "shard": 2}),
    (2, 8, 4, {"tensor": 4, "shard": 2}),
    (0, 4, 2, {"tensor": 2, "shard": 2}),
    (0, 2, 2, {"tensor": 2}),
    (2, 2, 2, {"tensor": 2}),
    (2, 4, 3, None),
    (3, 4, 2, None),
]


@every_case(("stage", "processes", "parts", "mesh"), AUTOTP)
def test_autotp_divides_layers_under_fsdp2(
    stage: int, processes: int, parts: int, mesh: dict[str, int] | None, tmp_path: Path
) -> None:
    (tmp_path / "ds.json").write_text(
        json.dumps({"zero_optimization": {"stage": stage}, "tensor_parallel": {"autotp_size": parts}})
    )
    config = "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds.json}\n"
    (tmp_path / "accelerate.yaml").write_text(f"{config}num_processes: {processes}\n")
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(TRL))
    made = import_config([tmp_path / name for name in ("sft.yaml", "accelerate.yaml", "ds.json")], ["data.format=text"])
    key = next(key for key in made.keys if key.key == "tensor_parallel")
    assert key.outcome == ("carried" if mesh else "unsupported")
    assert strategy(made).get("mesh") == mesh
    assert strategy(made)["name"] == ("fsdp2" if mesh else f"zero{stage}")


def found(made: Any, key: str) -> Any:
    return next(one for one in made.keys if one.key == f"parallelism_config_{key}")


@every_case(
    ("config", "sizes", "expected"),
    [
        (FSDP2, {"dp_replicate_size": 2, "dp_shard_size": 4}, {"replicate": 2, "shard": 4}),
        (FSDP2, {"dp_shard_size": 4, "tp_size": 2}, {"shard": 4, "tensor": 2}),
        (FSDP2, {"dp_shard_size": 4, "cp_size": 2}, {"shard": 4, "context": 2}),
        (FSDP2, {"cp_size": 8}, {"context": 8}),
        (DDP, {"tp_size": 8}, {"tensor": 8}),
        (DDP, {"tp_size": 2}, {"shard": 4, "tensor": 2}),
        (zero(3), {"sp_size": 2, "dp_shard_size": 4}, {"shard": 4, "context": 2}),
    ],
)
def test_carried(tmp_path: Path, config: str, sizes: dict[str, int], expected: dict[str, int]) -> None:
    made = of(tmp_path, config, **sizes)
    assert made.exit_code == 0, [key.line() for key in made.lost] + list(made.blocks)
    assert strategy(made)["mesh"] == expected
    assert strategy(made)["name"] == ("zero3" if config == zero(3) else "fsdp2")
    assert made.recipe.machine.processes == 8
    assert "accelerate.yaml:" in next(line for line in made.text.splitlines() if line.startswith("  mesh:"))
    carried = [key for key in made.keys if key.recipe == ("strategy.mesh",)]
    assert {key.outcome for key in carried} == {"carried"}


def test_all_processes_need_no_mesh(tmp_path: Path) -> None:
    assert "mesh" not in strategy(of(tmp_path, FSDP2, dp_shard_size=8, tp_size=1))
    assert "mesh" not in strategy(of(tmp_path, DDP, dp_replicate_size=8))


def test_an_axis_of_the_command_line_is_set_beside_the_files(tmp_path: Path) -> None:
    made = of(tmp_path, FSDP2, "strategy.mesh.context=2", dp_replicate_size=2, dp_shard_size=2, processes=8)
    assert strategy(made)["mesh"] == {"replicate": 2, "shard": 2, "context": 2}
    made = of(tmp_path, FSDP2, "strategy.mesh.shard=8", processes=8)
    assert strategy(made)["mesh"] == {"shard": 8}


def test_the_product_is_the_number_of_processes(tmp_path: Path) -> None:
    made = of(tmp_path, FSDP2, processes=None, dp_replicate_size=2, dp_shard_size=2)
    assert made.recipe.machine.processes == 4
    assert not any("do not say how many" in note for note in made.notes)


@every_case(
    ("config", "sizes", "key", "outcome", "reason"),
    [
        (FSDP1, {"dp_shard_size": 8}, "dp_shard_size", "unsupported", "under FSDP1"),
        (FSDP2, {"dp_shard_size": 4, "sp_size": 2}, "sp_size", "unsupported", "strategy.mesh.context"),
        (FSDP2, {"dp_shard_size": "eight"}, "dp_shard_size", "unsupported", "not a whole number"),
        (FSDP2, {"dp_shard_size": 8, "ep_size": 1}, "ep_size", "unknown", "no such key"),
        (DDP, {"dp_shard_size": 8}, "dp_shard_size", "no-effect", "plain DDP"),
        (DDP, {"cp_size": 8}, "cp_size", "unsupported", "MULTI_GPU"),
        (zero(3), {"tp_size": 8}, "tp_size", "unsupported", "LT524"),
        (zero(2), {"sp_size": 2, "dp_shard_size": 4}, "sp_size", "differs", "LT527"),
        (FSDP2, {"cp_size": 8, "cp_comm_strategy": "alltoall"}, "cp_comm_strategy", "no-effect", "Ulysses"),
    ],
)
def test_by_key(tmp_path: Path, config: str, sizes: dict[str, Any], key: str, outcome: str, reason: str) -> None:
    made = of(tmp_path, config, **sizes)
    assert (found(made, key).outcome, reason in found(made, key).reason) == (outcome, True), found(made, key)
    assert made.exit_code == int(outcome in ("unsupported", "unknown", "differs"))


def test_sizes_that_are_no_mesh_of_a_recipe_give_its_reason(tmp_path: Path) -> None:
    made = of(tmp_path, FSDP2, dp_shard_size=4, tp_size=3)
    assert made.exit_code == 1
    assert any("strategy.mesh" in block for block in made.blocks), made.blocks


def test_sizes_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "accelerate.yaml").write_text(FSDP2 + "parallelism_config: {parallelism_config_dp_shard_size: 4}\n")
    script = (
        "accelerate launch --config_file {} --num_processes 4 {} sft.py --model_name_or_path m --dataset_name d --bf16 "
        "--packing false --max_length 64 --output_dir out --learning_rate 1e-4 --per_device_train_batch_size 1\n"
    )
    flags = "--use_fsdp --fsdp_version 2 --use_parallelism_config --parallelism_config_dp_replicate_size 2"
    for text, mesh in ((f"{flags} --parallelism_config_dp_shard_size 2", {"replicate": 2, "shard": 2}),
                       ("--use_fsdp --fsdp_version 2", None)):  # fmt: skip
        (tmp_path / "run.sh").write_text(script.format(tmp_path / "accelerate.yaml", text))
        made = import_config([tmp_path / "run.sh", tmp_path / "accelerate.yaml"], ["data.format=text"])
        assert strategy(made).get("mesh") == mesh
    assert found(made, "dp_shard_size").outcome == "no-effect"
    assert "LT521" in found(made, "dp_shard_size").reason


@pytest.mark.parametrize(
    ("section", "outcome"),
    [({"tensor_parallel": {"autotp_size": 3}}, "unsupported"), ({"tensor_parallel": {"autotp_size": 1}}, "no-effect"),
     ({"sequence_parallel_size": 2}, "unsupported"), ({"sequence_parallel_size": 1}, "no-effect")],
)  # fmt: skip
def test_keys_of_deepspeed(tmp_path: Path, section: dict[str, Any], outcome: str) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}} | section))
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(TRL))
    made = import_config([tmp_path / "sft.yaml", tmp_path / "ds.json"], ["data.format=text", "machine.processes=2"])
    assert next(key.outcome for key in made.keys if key.key in section) == outcome
    assert strategy(made)["name"] == "zero2"


SPLITS: dict[str, tuple[dict[str, Any], int, dict[str, int] | None]] = {
    "sharded": ({"fsdp_size": 4}, 4, None),
    "copies": ({"fsdp_size": 2, "dp_replicate_size": 2}, 4, {"replicate": 2, "shard": 2}),
    "layers": ({"fsdp_size": 2, "tp_size": 2}, 4, {"shard": 2, "tensor": 2}),
    "experts within the shards": ({"fsdp_size": 8, "ep_size": 4}, 8, {"shard": 2, "expert": 4}),
    "experts alone": ({"fsdp_size": 2, "ep_size": 2}, 2, {"expert": 2}),
}


def of_split(folder: Path, config: str = "", **split: Any) -> Any:
    names = ["sft.yaml", "distributed_config.json"]
    experts = {"model_type": "mixtral", "num_local_experts": 8, "hidden_size": 32, "intermediate_size": 64}
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text(json.dumps(experts if "ep_size" in split else {"model_type": "llama"}))
    (folder / "sft.yaml").write_text(yaml.safe_dump(TRL | {"model_name_or_path": str(folder / "model")}))
    (folder / "distributed_config.json").write_text(json.dumps(split))
    if config:
        (folder / "accelerate.yaml").write_text(config)
        names.append("accelerate.yaml")
    return import_config([folder / name for name in names], ["data.format=text"])


@every_case("name", SPLITS)
def test_a_model_that_transformers_splits_is_fsdp2_with_a_mesh(name: str, tmp_path: Path) -> None:
    split, processes, mesh = SPLITS[name]
    made = of_split(tmp_path, **split)
    assert strategy(made) == {"name": "fsdp2"} | ({"mesh": mesh} if mesh else {})
    assert made.recipe.machine.processes == processes
    assert {key.outcome for key in made.keys if key.key in split} == {"carried"}


def test_every_key_of_distributed_config_has_an_outcome(tmp_path: Path) -> None:
    from transformers.distributed import DistributedConfig

    whole = DistributedConfig(fsdp_size=2, fsdp_mixed_precision=True).to_dict() | {
        "fsdp_plan": {"lm_head": "keep_full_weight"}, "pp_size": 2, "fsdp_sise": 2,
    }  # fmt: skip
    made = of_split(tmp_path, **whole)
    outcomes = {key.key: key.outcome for key in made.keys}
    assert set(whole) <= set(outcomes)
    assert (outcomes["fsdp_plan"], outcomes["pp_size"], outcomes["fsdp_sise"]) == ("unsupported",) * 2 + ("unknown",)
    assert outcomes["fsdp_mixed_precision"] == "carried"


def test_accelerate_starts_processes_and_divides_nothing_beside_it(tmp_path: Path) -> None:
    sizes = "parallelism_config: {parallelism_config_dp_shard_size: 4}\n"
    made = of_split(tmp_path, DDP + "num_processes: 4\n" + sizes, fsdp_size=4, fsdp_mixed_precision=True)
    assert strategy(made) == {"name": "fsdp2"}
    assert (made.recipe.machine.processes, made.recipe.precision) == (4, "bf16")
    [key] = [key for key in made.keys if key.key == "parallelism_config_dp_shard_size"]
    assert (key.outcome, key.reason) == ("no-effect", "transformers splits the model (DistributedConfig)")


def test_a_config_that_splits_nothing_leaves_the_launch_as_it_is(tmp_path: Path) -> None:
    made = of_split(tmp_path, FSDP2 + "num_processes: 4\n", fsdp_size=1)
    assert strategy(made)["name"] == "fsdp2"
    assert made.recipe.machine.processes == 4


def test_files_for_transformers_are_imported_as_the_recipe_they_were_written_from(tmp_path: Path) -> None:
    from toolkit import write_config

    recipe = {
        "model": {"config": {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4}},
        "tokenizer": {"path": "org/model"}, "data": {"train": "org/data"}, "precision": "bf16",
        "optimizer": {"lr": 1e-3}, "batch": {"micro_size": 2, "accumulation": 2}, "run": {"max_steps": 10},
        "strategy": {"name": "fsdp2", "mesh": {"replicate": 2, "shard": 2}}, "activation_checkpointing": "full",
        "machine": {"device": "cuda", "processes": 4},
    }  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    write_config(tmp_path / "recipe.yaml", tmp_path / "files", engine="transformers")
    names = ("training_args.json", "distributed_config.json", "accelerate.yaml")
    overrides = ["model.path=org/model", "data.train=org/data", "data.format=text", "precision=bf16"]
    made = import_config([tmp_path / "files" / name for name in names], overrides)
    again = made.recipe.model_dump(mode="json", exclude_unset=True)
    assert again["strategy"] == recipe["strategy"]
    assert again["machine"]["processes"] == 4
    assert again["activation_checkpointing"] == "full"
    assert (again["batch"]["micro_size"], again["batch"]["accumulation"]) == (2, 2)
