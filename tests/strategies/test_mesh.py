"""strategy.mesh: what is refused, what is explained, what the launch files say, and what is sent along which axis."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import yaml

from cases import every_case
from families import EVERY_FAMILY
from tiny import LLAMA, recipe_dict
from toolkit.__main__ import main
from toolkit.errors import InputError
from toolkit.launch.files import launch_files, parts, write_files
from toolkit.recipe.mesh import Mesh, RowPart
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve, strategy_of
from toolkit.strategies.memory.base import Holdings, Weight

HYBRIDS = ["fsdp1", "fsdp2", "zero3"]


def resolved(strategy: str, mesh: dict[str, int] | None, **sections: Any) -> Resolved:
    own = {"name": strategy} | ({"mesh": mesh} if mesh is not None else {})
    sections = {"machine": {"processes": 4}} | sections
    recipe = recipe_dict(Path("nowhere"), strategy=own, **sections)
    return resolve(Recipe.model_validate(recipe), "recipe.yaml", device=sections["machine"].get("device", "cpu"))


@every_case(
    ("mesh", "machine", "message"),
    [
        ({"replicate": 2, "shard": 4}, {"processes": 4},
         r"2 x shard 4 = 8, but there are 4 processes; set replicate: 1"),
        ({"replicate": 2}, {"processes": 4}, r"2 x shard 1 = 2, but there are 4 processes; set shard: 2"),
        ({"replicate": 2, "shard": 3}, {"processes": 4}, r"= 6, but there are 4 processes; set shard: 2"),
        ({"replicate": 3, "shard": 3}, {"processes": 4}, r"= 9, but .*; set machine\.processes: 9"),
        ({"shard": 8}, {"processes": 4, "nodes": 3}, r"= 8, but there are 12 processes \(4 x 3 nodes\); set shard: 12"),
        ({"shard": 2, "context": 4}, {"processes": 4}, r"2 x context 4 = 8, but there are 4 processes; set shard: 1"),
        ({"context": 4}, {"processes": 2}, r"context 4 = 4, but there are 2 processes; set context to a divisor of 2"),
        ({"context": 3}, {"processes": 4}, r"context 3 = 3, but there are 4 processes; set context to a divisor of 4"),
        ({"shard": 2, "tensor": 4}, {"processes": 4}, r"2 x tensor 4 = 8, but there are 4 processes; set shard: 1"),
        ({"shard": 2, "tensor": 3}, {"processes": 4}, r"= 6, but there are 4 processes; set tensor to a divisor of 4"),
        ({"context": 2, "pipeline": 2}, {"processes": 2}, r"= 4, but there are 2 processes; set pipeline: 1$"),
        ({"tensor": 4, "context": 2}, {"processes": 4, "nodes": 2}, r"2 x 4 \(tensor\) consecutive .* on one node"),
        ({"pipeline": 3}, {"processes": 4}, r"1 x pipeline 3 = 3, but .*; set pipeline to a divisor of 4"),
        ({"pipeline": 2}, {"processes": 4},
         r"1 x pipeline 2 = 2, but .*; set shard: 2; under ddp, which shards nothing, replicate: 2$"),
        ({"replicate": 3, "shard": 2, "tensor": 2}, {"processes": 6, "nodes": 2},
         r"groups of 2 groups of 2 ranks do not fit into nodes of 6 processes; set a divisor or a multiple of 3"),
        ({"replicate": 3, "shard": 4}, {"processes": 6, "nodes": 2},
         r"mesh\.shard: groups of 4 .* nodes of 6 processes"),
    ],
)  # fmt: skip
def test_a_wrong_product_is_refused_with_the_numbers(
    mesh: dict[str, int], machine: dict[str, int], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        resolved("fsdp2", mesh, machine=machine)


MIXTRAL = EVERY_FAMILY["mixtral"]["config"]
STAGED = LLAMA | {"num_hidden_layers": 4, "attention_dropout": 0.0}
NO_EXPERTS: list[tuple[str, dict[str, int], dict[str, Any], str]] = [
    ("fsdp2", {"expert": 4}, {"model": {"config": LLAMA}}, r"llama has no plan for its experts, .* are deepseek_v3"),
    ("fsdp2", {"expert": 4}, {"model": {"config": MIXTRAL | {"num_local_experts": 6}}}, r"4 ranks cannot divide 6 exp"),
    ("fsdp2", {"expert": 4}, {"precision": "fp16"}, r"has not been verified with fp16"),
    ("fsdp2", {"expert": 4}, {"compile": True}, r"has not been verified with compiled blocks"),
    ("fsdp2", {"expert": 4}, {"adapter": {"method": "dora"}}, r"verified with adapter\.method: lora alone"),
    ("fsdp2", {"expert": 4}, {"adapter": {"r": 4, "modules_to_save": ["lm_head"]}}, r"modules_to_save; remove it"),
    ("fsdp2", {"expert": 4}, {"optimizer": {"name": "muon"}}, r"optimizer\.name: muon needs whole matrices"),
    ("fsdp2", {"expert": 4}, {"run": {"ema": {"decay": 0.9}}}, r"has not been verified with run\.ema; remove it"),
    ("fsdp2", {"expert": 2, "shard": 4}, {"machine": {"processes": 8}},
     r"4 ranks \(shard\) cannot divide the 2 experts that each has of 4; set shard to a divisor of 2"),
]  # fmt: skip


@every_case(("strategy", "mesh", "sections", "message"), NO_EXPERTS, ids=[row[3][:30] for row in NO_EXPERTS])
def test_experts_that_cannot_be_divided_are_refused_with_the_reason(
    strategy: str, mesh: dict[str, int], sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=rf"strategy\.mesh\.expert: .*{message}"):
        resolved(strategy, mesh, **({"model": {"config": MIXTRAL}} | sections))


def test_experts_of_stages_are_not_balanced_apart() -> None:
    config = MIXTRAL | {"output_router_logits": True}
    with pytest.raises(InputError, match=r"mesh\.pipeline: would balance the experts of each stage apart; set output_"):
        resolved("ddp", {"pipeline": 2, "replicate": 2}, model={"config": config})


def test_rows_and_layers_are_both_divided() -> None:
    """The ranks of a layer are neighbours, those of a row as far apart as there are of them."""
    found = resolved("fsdp2", {"context": 2, "tensor": 2, "shard": 2}, machine={"processes": 8},
                     model={"config": SPLIT | {"num_attention_heads": 4}})  # fmt: skip
    mesh = found.mesh
    assert [mesh.layer_ranks(rank) for rank in (0, 5)] == [[0, 1], [4, 5]]
    assert [mesh.context_ranks(rank) for rank in (0, 3, 5)] == [[0, 2], [1, 3], [5, 7]]
    assert [mesh.state_peers(rank) for rank in (0, 3)] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert [found.row_part(rank) for rank in (1, 2)] == [RowPart(0, 2), RowPart(1, 2)]
    assert (found.data_size, found.token_parts, found.ranks_per_part) == (2, 4, 2)
    with pytest.raises(InputError, match=r"2 ranks cannot divide 1 attention heads of each of 2 parts of a layer"):
        resolved("fsdp2", {"context": 2, "tensor": 2}, model={"config": SPLIT | {"num_attention_heads": 2}})


def test_experts_are_sharded_by_the_ranks_that_have_the_same_ones() -> None:
    """And everything else by all of them; copies, where there are any, are other groups of those."""
    sizes = {"expert": 2, "shard": 2, "replicate": 2}
    found = resolved("fsdp2", sizes, machine={"processes": 8}, model={"config": MIXTRAL})
    assert found.mesh == Mesh(2, 4, expert=2)
    assert (found.data_size, found.state_ranks, found.mesh.expert_shards) == (8, 4, 2)
    assert found.mesh.expert_ranks(5) == [4, 5]
    assert found.mesh.expert_copies(5) == [5, 7]
    assert found.mesh.expert_peers(5) == [1, 3, 5, 7]


def test_experts_are_over_ranks_that_have_samples_of_their_own() -> None:
    found = resolved(
        "fsdp2", {"expert": 2, "replicate": 4}, machine={"processes": 4, "nodes": 2}, model={"config": MIXTRAL}
    )
    assert found.mesh == Mesh(4, 2, expert=2)
    assert (found.data_size, found.token_parts, found.ranks_per_part) == (8, 8, 1)
    assert found.mesh.expert_copies(5) == [5]
    assert found.mesh.expert_ranks(5) == [4, 5]
    assert found.mesh.expert_peers(5) == [1, 3, 5, 7]
    decided = {d.key: d.reason for d in found.decisions}
    assert decided["strategy.mesh.expert"].startswith("2 consecutive ranks each have a part of every layer's experts")
    with pytest.raises(InputError, match=r"mesh\.expert: 4 consecutive ranks .* one node, which has 6 processes"):
        resolved(
            "fsdp2", {"expert": 4, "replicate": 3}, machine={"processes": 6, "nodes": 2}, model={"config": MIXTRAL}
        )
    with pytest.raises(InputError, match=r"expert 3 = 3, but there are 4 processes; set expert to a divisor of 4"):
        resolved("fsdp2", {"expert": 3}, model={"config": MIXTRAL})


REFUSED: list[tuple[str, dict[str, int], str, str, str, dict[str, int]]] = [
    # strategy, mesh, key, reason, and the strategy and mesh that are proposed
    ("ddp", {"tensor": 4}, "tensor", "ddp does not divide layers", "fsdp2", {"tensor": 4}),
    ("ddp", {"tensor": 2, "replicate": 2}, "tensor", "ddp does not divide layers", "fsdp2", {"shard": 2, "tensor": 2}),
    ("ddp", {"context": 2, "tensor": 2}, "tensor", "ddp does not divide layers", "fsdp2", {"context": 2, "tensor": 2}),
    *((name, {"tensor": 2, "shard": 2}, "tensor", f"{name} does not divide layers", "fsdp2", {"shard": 2, "tensor": 2})
      for name in ("zero1", "zero2", "zero3", "fsdp1")),
    ("ddp", {"expert": 2, "replicate": 2}, "expert", "ddp does not divide experts", "fsdp2",
     {"replicate": 2, "expert": 2}),
    *((name, {"expert": 4}, "expert", f"{name} does not divide experts", "fsdp2", {"expert": 4})
      for name in ("ddp", "zero1", "zero2", "zero3", "fsdp1")),
    *((name, {"pipeline": 2, "shard": 2}, "pipeline", f"{name} does not divide blocks", "fsdp2",
       {"shard": 2, "pipeline": 2}) for name in ("zero1", "zero2", "zero3", "fsdp1")),
    ("ddp", {"pipeline": 2, "tensor": 2}, "pipeline", "is not supported beside tensor: a stage has its layers whole",
     "fsdp2", {"shard": 2, "tensor": 2}),
    ("fsdp2", {"pipeline": 2, "tensor": 2}, "pipeline", "is not supported beside tensor: a stage has its layers whole",
     "fsdp2", {"shard": 2, "tensor": 2}),
    ("ddp", {"pipeline": 2, "expert": 2}, "pipeline", "is not supported beside expert: a stage has all experts of its",
     "fsdp2", {"replicate": 2, "expert": 2}),
    ("fsdp2", {"pipeline": 2, "expert": 2}, "pipeline", "is not supported beside expert: a stage has all experts of",
     "fsdp2", {"replicate": 2, "expert": 2}),
    ("fsdp2", {"pipeline": 2, "context": 2}, "pipeline", "is not supported beside context: a stage passes whole rows",
     "fsdp2", {"shard": 2, "context": 2}),
    ("fsdp2", {"expert": 2, "tensor": 2}, "tensor", "is not supported beside expert: ranks that divide experts have",
     "fsdp2", {"replicate": 2, "expert": 2}),
    ("fsdp2", {"expert": 2, "context": 2}, "context", "is not supported beside expert: ranks that divide experts have",
     "fsdp2", {"replicate": 2, "expert": 2}),
]  # fmt: skip


@every_case(
    ("strategy", "mesh", "key", "reason", "other", "instead"),
    REFUSED,
    ids=[f"{row[0]}-{'-'.join(row[1])}" for row in REFUSED],
)
def test_a_mesh_that_does_not_work_is_refused_with_one_that_does(
    strategy: str, mesh: dict[str, int], key: str, reason: str, other: str, instead: dict[str, int]
) -> None:
    """One message, with the file and the key; what it proposes is accepted."""
    # A model that can be divided along every axis which is proposed for it.
    config = MIXTRAL if "expert" in mesh else STAGED | {"num_attention_heads": 4, "num_key_value_heads": 4}
    with pytest.raises(InputError) as raised:
        resolved(strategy, mesh, model={"config": config})
    written = ", ".join(f"{axis}: {size}" for axis, size in instead.items())
    (message,) = raised.value.args
    assert message.startswith(f"recipe.yaml: strategy.mesh.{key}: {reason}")
    assert message.endswith(f"; set strategy.name: {other} and strategy.mesh: {{{written}}}")
    assert resolved(other, instead, model={"config": config}).world_size == 4


def test_a_strategy_may_name_its_engine_of_stages_as_before() -> None:
    """For one release, with a warning."""
    ddp = type(strategy_of(resolved("ddp", None)))
    traits = dataclasses.replace(ddp.traits, layouts=frozenset(), stages=True)
    with pytest.warns(DeprecationWarning, match=r"Mine: staged_engine .* are Traits\(layouts="):
        kind = type("Mine", (ddp,), {"traits": traits, "staged_engine": "collections:OrderedDict"})
    assert kind.traits.layouts == {"pipeline"}
    staged = resolved("ddp", {"pipeline": 2, "replicate": 2}, model={"config": STAGED})
    assert kind().engine_for(staged) is OrderedDict
    assert [one.__name__ for one in ddp().engine_for(staged).__mro__[:3]] == ["StagedDdpEngine", "Staged", "DdpEngine"]
    assert kind().engine_for(resolved("ddp", None)) is ddp().engine_class()


@pytest.mark.parametrize("command", ["config", "plan", "train", "verify"])
def test_every_command_refuses_such_a_mesh(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit status 2 and one line, no traceback: a recipe of an earlier version may have one."""
    values = recipe_dict(tmp_path, strategy={"name": "ddp", "mesh": {"tensor": 2}}, machine={"processes": 2})
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    monkeypatch.chdir(tmp_path)
    options = ["-o", "files"] if command == "config" else []
    monkeypatch.setattr(sys, "argv", ["toolkit", command, "recipe.yaml", *options])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (2, "")
    assert (
        said.err.count("recipe.yaml: strategy.mesh.tensor: ddp does not divide layers; set strategy.name: fsdp2") == 1
    )
    assert "Traceback" not in said.err
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


MODEL = LLAMA | {"num_attention_heads": 4}
NOT_DIVISIBLE: list[tuple[dict[str, Any], str]] = [
    ({"model": {"config": {"model_type": "bert", "num_attention_heads": 4}, "task": "masked-lm"}},
     r"divides the rows of model\.task: causal-lm \(it is masked-lm\)"),
    ({"model": {"config": MODEL, "attention": "eager"}}, r"requires model\.attention: sdpa \(it is eager\)"),
    ({"compile": True}, r"has not been verified with compiled blocks; set compile: false"),
    ({"model": {"config": MODEL, "neftune_alpha": 5.0}}, r"has not been verified with model\.neftune_alpha"),
    ({"adapter": {"method": "prompt-tuning", "options": {"num_virtual_tokens": 4}}},
     r"would put the virtual tokens of prompt-tuning in front of every part"),
    ({"model": {"config": {"model_type": "lfm2", "num_attention_heads": 4}}},
     r"requires a model whose tokens meet in attention alone: lfm2: a recurrence or convolution"),
    ({"model": {"config": LLAMA | {"model_type": "mixtral", "output_router_logits": True}}},
     r"would balance the experts of each part"),
    ({"model": {"config": LLAMA | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}}},
     r"would choose the rotary frequencies of each part by its own last position, .* \(rope_type dynamic\)"),
    ({"model": {"config": LLAMA | {"rope_scaling": {"type": "longrope", "factor": 2.0}}}}, r".*\(rope_type longrope\)"),
    ({"model": {"config": LLAMA | {"num_attention_heads": 3, "num_key_value_heads": 3}}},
     r"2 ranks cannot divide 3 attention heads; set a divisor of 3"),
]  # fmt: skip


@every_case(("sections", "message"), NOT_DIVISIBLE, ids=[message[:24] for _, message in NOT_DIVISIBLE])
def test_rows_that_cannot_be_divided_are_refused_with_the_reason(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=rf"recipe\.yaml: strategy\.mesh\.context: {message}"):
        resolved("fsdp2", {"shard": 2, "context": 2}, **sections)


def test_ranks_that_divide_rows_share_their_samples() -> None:
    found = resolved("fsdp2", {"replicate": 2, "shard": 2, "context": 2}, machine={"processes": 8})
    assert (found.data_size, found.token_parts, found.ranks_per_part, found.state_ranks) == (4, 8, 1, 4)
    assert [found.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [found.row_part(rank) for rank in range(4)] == [RowPart(0, 2), RowPart(1, 2)] * 2
    assert list(RowPart(1, 2).tokens(10)) == [5, 6, 7, 8, 9]
    assert found.global_size == found.micro_size * found.accumulation * 4
    assert parts(found) == "4 data-parallel ranks"
    decided = {d.key: d.reason for d in found.decisions}
    assert "the ranks of context divide the state too: 4 parts of it" in decided["strategy.mesh.shard"]
    assert decided["strategy.mesh.context"].startswith("2 consecutive ranks each compute a part of every row's tokens")
    with pytest.raises(InputError, match=r"global_size: 6 is not a multiple of 1 x 4 data-parallel ranks"):
        resolved(
            "fsdp2",
            {"shard": 4, "context": 2},
            machine={"processes": 8},
            batch={"global_size": 6, "micro_size": 1, "accumulation": None},
        )
    files = launch_files(found, Path("launch"), "recipe.yaml", [])
    assert '"sequence_parallel_size"' not in files.get("deepspeed.json", "")
    zero = resolved("zero2", {"shard": 2, "context": 2})
    config = json.loads(launch_files(zero, Path("launch"), "recipe.yaml", [])["deepspeed.json"])
    assert config["sequence_parallel_size"] == 2
    assert config["train_batch_size"] == zero.global_size


def test_parts_of_a_row_are_on_one_node() -> None:
    with pytest.raises(InputError, match=r"mesh\.context: 4 consecutive ranks .* one node, which has 2 processes"):
        resolved("fsdp2", {"context": 4}, machine={"processes": 2, "nodes": 2})


SPLIT = LLAMA | {"attention_dropout": 0.0}
NOT_SPLITTABLE: list[tuple[dict[str, Any], str]] = [
    ({"model": {"config": {"model_type": "gpt2", "n_head": 4}}}, r"gpt2 has no plan for its layers"),
    # Its config class draws masks unless it is configured not to.
    ({"model": {"config": {key: value for key, value in SPLIT.items() if key != "attention_dropout"}
                | {"model_type": "seed_oss"}}}, r"would draw the same dropout mask.* set attention_dropout"),
    ({"model": {"config": SPLIT | {"attention_dropout": 0.1}}}, r"would draw the same dropout mask.* set attention_"),
    ({"model": {"config": SPLIT | {"num_attention_heads": 3, "num_key_value_heads": 3}}},
     r"2 ranks cannot divide 3 attention heads; set a divisor of 3"),
    ({"model": {"config": SPLIT | {"num_key_value_heads": 1}}}, r"2 ranks cannot divide 1 key heads"),
    ({"model": {"config": SPLIT | {"intermediate_size": 65}}}, r"2 ranks cannot divide 65 columns"),
    ({"precision": "fp16"}, r"has not been verified with fp16"),
    ({"compile": True}, r"has not been verified with compiled blocks; set compile: false"),
    ({"adapter": {"method": "dora"}}, r"has been verified with adapter\.method: lora alone \(it is dora\)"),
    ({"optimizer": {"name": "muon"}}, r"optimizer\.name: muon needs whole matrices; use adamw, lion or sgd"),
    ({"run": {"ema": {"decay": 0.9}}}, r"has not been verified with run\.ema; remove it"),
]  # fmt: skip


@every_case(("sections", "message"), NOT_SPLITTABLE, ids=[message[:24] for _, message in NOT_SPLITTABLE])
def test_layers_that_cannot_be_divided_are_refused_with_the_reason(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=rf"recipe\.yaml: strategy\.mesh\.tensor: {message}"):
        resolved("fsdp2", {"shard": 2, "tensor": 2}, **({"model": {"config": SPLIT}} | sections))


def test_layers_are_divided_with_and_without_ranks_that_shard() -> None:
    """accelerate has no keys for a mesh in which one rank shards, so its file names none."""
    for mesh, data_size in (({"shard": 2, "tensor": 2}, 2), ({"tensor": 4}, 1)):
        found = resolved("fsdp2", mesh, model={"config": SPLIT | {"num_attention_heads": 4, "num_key_value_heads": 4}})
        assert (found.data_size, found.state_ranks) == (data_size, data_size)
        assert found.global_size == data_size * found.micro_size * found.accumulation
        files = launch_files(found, Path("launch"), "recipe.yaml", [])
        assert ("parallelism_config_tp_size" in files["accelerate.yaml"]) == (data_size > 1)
    with pytest.raises(InputError, match=r"mesh\.shard: with 1 fsdp2 has nothing to shard; .* or use replicate: 1"):
        resolved("fsdp2", {"replicate": 2, "tensor": 2}, model={"config": SPLIT})


def test_ranks_that_divide_layers_share_their_samples() -> None:
    machine = {"processes": 4, "nodes": 2}
    found = resolved("fsdp2", {"replicate": 2, "shard": 2, "tensor": 2}, machine=machine, model={"config": SPLIT})
    assert (found.data_size, found.token_parts, found.ranks_per_part, found.state_ranks) == (4, 4, 2, 2)
    assert [found.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [found.mesh.column(rank) for rank in range(4)] == [0, 1, 0, 1]
    assert found.mesh.layer_ranks(5) == [4, 5]
    assert found.mesh.state_peers(5) == [1, 3, 5, 7]
    assert [(found.mesh.replica(rank), found.mesh.place(rank)) for rank in (0, 2, 4, 6)] == [
        (0, 0), (0, 1), (1, 0), (1, 1)
    ]  # fmt: skip
    decided = {d.key: d.reason for d in found.decisions}
    assert decided["strategy.mesh.tensor"].startswith(
        "2 consecutive ranks each compute a part of every layer's matrices"
    )
    assert decided["strategy.mesh.shard"].endswith("ranks 2 apart, which have the same part of every layer")
    files = launch_files(found, Path("launch"), "recipe.yaml", [])
    assert "parallelism_config_tp_size: 2" in files["accelerate.yaml"]
    assert "parallelism_config_dp_shard_size: 2" in files["accelerate.yaml"]


def test_parts_of_a_layer_are_on_one_node() -> None:
    with pytest.raises(InputError, match=r"mesh\.tensor: 4 consecutive ranks .* one node, which has 2 processes"):
        resolved("fsdp2", {"tensor": 4}, machine={"processes": 2, "nodes": 2}, model={"config": SPLIT})


NOT_STAGEABLE: list[tuple[dict[str, Any], str]] = [
    ({"model": {"config": {"model_type": "gpt2", "n_layer": 4}}}, r"gpt2 has no plan for its stages"),
    ({"model": {"config": STAGED | {"num_hidden_layers": 1}}}, r"the model has 1 blocks, and each stage .* set 1 or"),
    ({"model": {"config": STAGED, "task": "sequence-classification", "num_labels": 3}},
     r"requires model\.task: causal-lm \(it is sequence-classification\)"),
    ({"model": {"config": STAGED, "neftune_alpha": 5.0}}, r"has not been verified with model\.neftune_alpha"),
    ({"precision": "fp16"}, r"has not been verified with fp16, .* use bf16"),
    ({"compile": True}, r"has not been verified with compiled blocks; set compile: false"),
    ({"adapter": {"method": "dora"}}, r"has been verified with adapter\.method: lora alone \(it is dora\)"),
    ({"optimizer": {"name": "muon"}}, r"has not been verified with optimizer\.name: muon; use adamw, lion or sgd"),
    ({"sync": "every"}, r"sums gradients over the copies .* once per step; set strategy\.sync: last"),
]  # fmt: skip


@every_case(("sections", "message"), NOT_STAGEABLE, ids=[message[:24] for _, message in NOT_STAGEABLE])
def test_blocks_that_cannot_be_divided_are_refused_with_the_reason(sections: dict[str, Any], message: str) -> None:
    strategy = {"name": "ddp", "mesh": {"replicate": 2, "pipeline": 2}}
    strategy |= {"sync": sections["sync"]} if "sync" in sections else {}
    rest = {key: value for key, value in sections.items() if key != "sync"}
    recipe = recipe_dict(Path("nowhere"), strategy=strategy, machine={"processes": 4},
                         **({"model": {"config": STAGED}} | rest))  # fmt: skip
    with pytest.raises(InputError, match=rf"recipe\.yaml: strategy\.mesh\.pipeline: {message}"):
        resolve(Recipe.model_validate(recipe), "recipe.yaml", device="cpu")


def test_sharded_stages_are_not_in_accelerates_file() -> None:
    """Its ParallelismConfig has no axis for them, and the product of its sizes has to be the number of processes."""
    found = resolved("fsdp2", {"shard": 2, "pipeline": 2}, model={"config": STAGED})
    assert "parallelism_config" not in launch_files(found, Path("launch"), "recipe.yaml", [])["accelerate.yaml"]
    assert (found.data_size, found.state_ranks, found.token_parts) == (2, 2, 2)
    with pytest.raises(InputError, match=r"mesh\.shard: with 1 fsdp2 has nothing to shard"):
        resolved("fsdp2", {"pipeline": 4}, model={"config": STAGED})


def test_stages_share_their_samples_and_are_as_far_apart_as_can_be() -> None:
    """The ranks of a stage are consecutive: gradients are averaged within a node, hidden states pass between nodes."""
    found = resolved("ddp", {"replicate": 2, "pipeline": 3}, machine={"processes": 2, "nodes": 3},
                     model={"config": STAGED})  # fmt: skip
    assert found.mesh == Mesh(2, 1, pipeline=3)
    assert (found.data_size, found.token_parts, found.ranks_per_part, found.global_size) == (2, 2, 3, 8)
    assert [found.data_rank(rank) for rank in range(6)] == [0, 1, 0, 1, 0, 1]
    assert [found.mesh.stage(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert found.mesh.stage_ranks(3) == [1, 3, 5]
    assert found.mesh.state_peers(3) == [2, 3]
    assert found.part_ranks == [4, 5]
    decided = {d.key: d.reason for d in found.decisions}
    assert decided["strategy.mesh.pipeline"].startswith("3 stages of consecutive blocks, on ranks 2 apart")
    assert "no key for it" in decided["strategy.mesh.pipeline"]
    assert decided["strategy.mesh.replicate"].startswith("copies of each stage, on 2 consecutive ranks")
    files = launch_files(found, Path("launch"), "recipe.yaml", [])
    assert "parallelism_config" not in files["accelerate.yaml"]


@every_case(
    ("strategy", "mesh", "message"),
    [
        ("ddp", {"shard": 4}, r"mesh\.shard: ddp keeps all weights.*replicate: 4.*fsdp1, fsdp2, zero3|zero3, fsdp1"),
        ("zero2", {"replicate": 2, "shard": 2}, r"mesh\.replicate: zero2 shards over all processes.*shard: 4"),
        ("zero1", {"replicate": 2, "shard": 2}, r"mesh\.replicate: zero1 shards over all processes"),
        *((name, {"replicate": 4}, rf"mesh\.shard: with 1 {name} has nothing to shard") for name in HYBRIDS),
    ],
)
def test_what_a_strategy_cannot_be_is_refused(strategy: str, mesh: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolved(strategy, mesh)


@pytest.mark.parametrize("strategy", HYBRIDS)
def test_offload_with_copies_is_refused(strategy: str) -> None:
    mesh = {"replicate": 2, "shard": 2}
    values = resolved(strategy, mesh, machine={"processes": 4, "device": "cuda"}).recipe.model_dump(exclude_unset=True)
    values["strategy"] |= {"offload": "all"}
    with pytest.raises(InputError, match=r"strategy\.offload: is not verified with copies"):
        resolve(Recipe.model_validate(values), device="cuda")


@pytest.mark.parametrize("strategy", HYBRIDS)
def test_a_mesh_keeps_the_data_parallel_size(strategy: str) -> None:
    found = resolved(strategy, {"replicate": 2, "shard": 2})
    assert found.mesh == Mesh(2, 2)
    assert (found.data_size, found.global_size, found.ranks_per_part) == (4, 16, 1)
    assert [found.data_rank(rank) for rank in range(4)] == [0, 1, 2, 3]
    assert found.state_ranks == (4 if strategy == "zero3" else 2)


def test_without_a_mesh_there_is_one_group_of_all_processes() -> None:
    assert resolved("fsdp2", None).mesh == Mesh(1, 4)
    assert resolved("zero2", None).mesh == Mesh(1, 4)
    assert resolved("ddp", None).mesh == Mesh(4, 1)
    assert resolved("ddp", {"replicate": 4}).mesh == Mesh(4, 1)
    assert resolved("zero2", {"shard": 4}).mesh == Mesh(1, 4)


def test_each_axis_is_explained() -> None:
    machine = {"processes": 8, "nodes": 4, "device": "cuda"}
    decided = {d.key: d for d in resolved("fsdp2", {"replicate": 4, "shard": 8}, machine=machine).decisions}
    axes = {key.removeprefix("strategy.mesh."): d.value for key, d in decided.items() if "strategy.mesh." in key}
    assert axes == {"replicate": 4, "shard": 8, "context": 1, "tensor": 1, "pipeline": 1, "expert": 1}
    assert "all processes of a node" in decided["strategy.mesh.shard"].reason
    assert "over the network between nodes" in decided["strategy.mesh.replicate"].reason
    assert decided["strategy.mesh.tensor"].reason == "every layer is computed by one process"
    assert decided["strategy.mesh.pipeline"].reason == "every process computes all blocks"
    assert decided["strategy.mesh.expert"].reason == "every process has all experts"
    second = {d.key: d.reason for d in resolved("zero3", {"replicate": 4, "shard": 8}, machine=machine).decisions}
    assert "second copies of the weights" in second["strategy.mesh.replicate"]
    assert "sharded over all 32 processes" in second["zero.zero_hpz_partition_size"]
    wide = resolved("fsdp2", {"replicate": 2, "shard": 16}, machine=machine)
    reason = next(d.reason for d in wide.decisions if d.key == "strategy.mesh.shard")
    assert reason.startswith("2 nodes: weights are gathered over the network")


def test_torchs_own_groups_of_hybrid_shard_are_a_nodes_gpus() -> None:
    """accelerate has no key for the group size of fsdp1: noted where the files say less than the recipe."""
    node = {"processes": 4, "nodes": 2, "device": "cuda"}
    text = {}
    for shard in (4, 2):
        found = resolved("fsdp1", {"replicate": 8 // shard, "shard": shard}, machine=node)
        text[shard] = next(d.reason for d in found.decisions if d.key == "fsdp.group_size")
    assert text[4] == "a node's GPUs, torch's own groups"
    assert "accelerate.yaml has no key for it" in text[2]


# ------------------------------------------------------------------ files


def files(strategy: str, mesh: dict[str, int] | None, folder: Path, **strategy_keys: Any) -> dict[str, Any]:
    found = resolved(strategy, mesh, machine={"processes": 4, "device": "cuda"}, precision="bf16")
    if strategy_keys:
        values = found.recipe.model_dump(exclude_unset=True)
        values["strategy"] |= strategy_keys
        found = resolve(Recipe.model_validate(values), device="cuda")
    written = launch_files(found, folder, "recipe.yaml")
    write_files(written, folder)
    return {"accelerate": yaml.safe_load(written["accelerate.yaml"]), **written}


def test_accelerate_launch_takes_the_mesh(tmp_path: Path) -> None:
    """Its own parser, and its own ParallelismConfig from the environment that it gives the processes."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    files("fsdp2", {"replicate": 2, "shard": 2}, tmp_path)
    arguments = launch_command_parser().parse_args(["--config_file", str(tmp_path / "accelerate.yaml"), "train.py"])
    arguments, defaults, _ = _validate_launch_command(arguments)
    assert defaults.parallelism_config["parallelism_config_dp_replicate_size"] == 2
    environment = prepare_multi_gpu_env(arguments)
    assert environment["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true"
    with pytest.MonkeyPatch.context() as patch:
        for key, value in environment.items():
            if key.startswith("PARALLELISM_CONFIG_"):
                patch.setenv(key, value)
        from accelerate import ParallelismConfig

        config = ParallelismConfig()
    assert (config.dp_replicate_size, config.dp_shard_size, config.total_size) == (2, 2, 4)
    assert config.fsdp_dim_names == ["dp_replicate", "dp_shard_cp"]


def test_fsdp1_is_hybrid_in_accelerates_words(tmp_path: Path) -> None:
    from torch.distributed.fsdp import ShardingStrategy

    mesh = {"replicate": 2, "shard": 2}
    assert files("fsdp1", mesh, tmp_path)["accelerate"]["fsdp_config"]["fsdp_sharding_strategy"] == "HYBRID_SHARD"
    kept = files("fsdp1", mesh, tmp_path, reshard_after_forward=False)["accelerate"]
    assert kept["fsdp_config"]["fsdp_sharding_strategy"] == "HYBRID_SHARD_ZERO2"
    from toolkit.strategies.engines.fsdp1 import Fsdp1Engine

    for reshard, expected in ((True, "HYBRID_SHARD"), (False, "_HYBRID_SHARD_ZERO2")):
        found = resolved("fsdp1", mesh)
        settings = dataclasses.replace(found.settings, reshard=reshard)
        assert Fsdp1Engine.plugin(settings, "float32", "float32").sharding_strategy == ShardingStrategy[expected]


def test_deepspeed_reads_the_size_of_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    monkeypatch.setenv("WORLD_SIZE", "1")
    written = json.loads(files("zero3", {"replicate": 2, "shard": 2}, tmp_path)["deepspeed.json"])
    parsed = DeepSpeedConfig(written | {"train_batch_size": written["train_batch_size"] // 4})
    assert parsed.zero_config.zero_hpz_partition_size == 2


@every_case("strategy", ["ddp", "zero2", *HYBRIDS])
def test_without_a_mesh_the_files_name_none(strategy: str, tmp_path: Path) -> None:
    written = files(strategy, None, tmp_path)
    assert "parallelism_config" not in written["accelerate.yaml"]
    assert "HYBRID" not in written["accelerate.yaml"]
    assert "hpz" not in written.get("deepspeed.json", "")


def test_deepspeed_has_no_mics_any_more() -> None:
    """A canary: where it is back, zero3 could shard all state within a group."""
    import importlib.util

    assert importlib.util.find_spec("deepspeed.runtime.zero.mics") is None


# ------------------------------------------------------------------ what is sent, by axis


def holdings(trained: int = 1000, frozen: int = 0) -> Holdings:
    weights = [Weight("a", (trained,), True, True, trained)]
    weights += [Weight("b", (frozen,), False, False, frozen)] if frozen else []
    return Holdings([weights], [0], [], [], False, 0)


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_state_is_gathered_within_a_group_and_summed_between_groups(strategy: str) -> None:
    found = resolved(strategy, {"replicate": 4, "shard": 2}, machine={"processes": 8})
    sent = strategy_of(found).traffic(found, holdings()).by_axis(found.accumulation)
    whole = 4 * 1000  # bytes, float32
    # Per micro-batch: weights gathered twice and gradients reduced once, a half of each; then a half of the gradients
    # all-reduced between four.
    assert sent == {"shard": 2 * 3 * whole / 2, "replicate": 2 * 2 * 3 / 4 * whole / 2}


def test_second_copies_are_gathered_from_all_ranks_once_in_a_step() -> None:
    found = resolved("zero3", {"replicate": 2, "shard": 2})
    assert found.accumulation == 2
    whole = 4 * 1000
    sent = strategy_of(found).traffic(found, holdings()).by_axis(found.accumulation)
    # Two micro-batches gather four times: the first from all four ranks; gradients are reduced over all of them.
    assert sent == pytest.approx({"all": whole * 3 / 4 + 2 * whole * 3 / 4, "shard": 3 * whole / 2})


def test_links_between_nodes_are_shared_by_the_rings_that_cross() -> None:
    from toolkit.planning.hardware import device_named
    from toolkit.planning.time import Rates, Wire

    machine = {"processes": 8, "nodes": 16, "device": "cuda"}
    found = resolved("fsdp2", {"replicate": 16, "shard": 8}, machine=machine)
    device, rates = device_named("h100", None), Rates()
    wire = Wire(found, device, rates)
    assert wire.speeds["shard"] == pytest.approx(device.link * rates.link * 1e9)
    assert wire.speeds["all"] == pytest.approx(rates.between_nodes * rates.link * 1e9)
    assert wire.speeds["replicate"] == pytest.approx(wire.speeds["all"] / 8)
