"""`toolkit config --for transformers`: the Trainer trains a model that transformers splits as these files say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from cases import every_case
from jobs import resolved_from
from nights import nightly_but
from tiny import recipe_dict
from toolkit.errors import InputError
from toolkit.launch.command import write_config
from toolkit.launch.split_files import split_files, split_notes
from toolkit.recipe.schema import Recipe

EXAMPLE = Path(__file__).parents[2] / "examples/hf_split_by_transformers.py"
FSDP2: dict[str, Any] = {
    "strategy": {"name": "fsdp2"}, "machine": {"device": "cuda", "processes": 2}, "run": {"save_every": 10},
}  # fmt: skip


def files_of(root: Path, **sections: Any) -> dict[str, Any]:
    files = split_files(resolved_from(recipe_dict(root, **FSDP2 | sections)), "out")
    assert set(files) == {"accelerate.yaml", "distributed_config.json", "training_args.json"}
    return {name: yaml.safe_load(text) for name, text in files.items()}


def test_bf16_is_fsdp2s_own_and_accelerate_divides_nothing(tiny_root: Path) -> None:
    made = files_of(tiny_root, precision="bf16")
    assert made["distributed_config.json"] == {"fsdp_size": 2, "fsdp_mixed_precision": True}
    assert made["training_args.json"]["bf16"] is False
    assert made["training_args.json"]["save_only_model"] is True
    assert made["accelerate.yaml"]["distributed_type"] == "MULTI_GPU"
    assert made["accelerate.yaml"]["mixed_precision"] == "no"
    assert not {"fsdp_config", "parallelism_config"} & set(made["accelerate.yaml"])


def test_copies_of_the_shards(tiny_root: Path) -> None:
    machine = {"device": "cuda", "processes": 4}
    strategy = {"name": "fsdp2", "mesh": {"replicate": 2, "shard": 2}}
    made = files_of(tiny_root, strategy=strategy, machine=machine, precision="fp32")
    split = {"dp_replicate_size": 2, "fsdp_size": 2, "fsdp_mixed_precision": False}
    assert made["distributed_config.json"] == split
    assert made["accelerate.yaml"]["num_processes"] == 4


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another strategy": ({"strategy": {"name": "zero2"}}, "strategy.name: zero2; transformers splits models"),
    "one process": ({"machine": {"device": "cuda", "processes": 1}}, "machine.processes: 1; there is nothing to"),
    "divided layers": ({"strategy": {"name": "fsdp2", "mesh": {"tensor": 2}}}, "strategy.mesh.tensor: the Trainer"),
    "offload": ({"strategy": {"name": "fsdp2", "offload": "all"}}, "strategy.offload: all; the Trainer is not proven"),
    "kept weights": ({"strategy": {"name": "fsdp2", "reshard_after_forward": False}}, "reshard_after_forward: false"),
    "half precision": ({"precision": "fp16"}, "precision: fp16; DistributedConfig has bf16"),
    "another adapter": ({"adapter": {"method": "ia3"}}, "adapter.method: ia3; the Trainer is proven with lora alone"),
}  # fmt: skip


@every_case("name", REFUSED)
def test_what_the_trainer_cannot_train_so_is_refused(name: str, tiny_root: Path) -> None:
    sections, said = REFUSED[name]
    resolved = resolved_from(recipe_dict(tiny_root, **FSDP2 | {"precision": "fp32"} | sections))
    for function in (lambda: split_files(resolved, "out"), lambda: split_notes(resolved)):
        with pytest.raises(InputError, match="--for transformers: ") as caught:
            function()
        assert said in str(caught.value)


def test_a_trainer_that_takes_no_such_model_is_refused(tiny_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.upstream.replacement.source_of", lambda package, file: "class Trainer: pass")
    with pytest.raises(InputError, match="its Trainer does not take models that it has split"):
        split_files(resolved_from(recipe_dict(tiny_root, **FSDP2)), "out")


def save_model(folder: Path) -> Path:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=256,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def numbers(output: str) -> list[float]:
    """The losses and gradient norms that the script prints."""
    lines = re.findall(r"^(?:losses|norms) (\[.*\])$", output, re.MULTILINE)
    assert len(lines) == 2, output[-2000:]
    return [number for line in lines for number in json.loads(line)]


def run(command: list[str], folder: Path) -> str:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("trained", nightly_but(["all", "lora"], "all"))
def test_the_trainer_trains_as_on_one_process(trained: str, tiny_root: Path, tmp_path: Path) -> None:
    """On two processes, each with half of the weights: the losses and norms of one process with their rows together."""
    recipe = recipe_dict(
        tiny_root,
        strategy={"name": "fsdp2"},
        machine={"device": "cpu", "processes": 2},
        precision="fp32",
        activation_checkpointing="full",
        optimizer={"lr": 1e-2},
        run={"max_steps": 3, "output_dir": "out", "save_every": 3},
    )
    adapter = [] if trained == "all" else [trained]
    made = write_config(Recipe.model_validate(recipe), tmp_path / "launch", engine="transformers")
    assert any("save_only_model" in note for note in made.notes)
    model = str(save_model(tmp_path / "model"))
    split = run(["launch/launch-script.sh", str(EXAMPLE), "launch", model, *adapter], tmp_path)
    own, whole = map(int, re.findall(r"rank 1 holds (\d+) of (\d+) elements", split)[0])
    assert own < 0.6 * whole, "the weights are divided"
    assert (tmp_path / "out/checkpoint-3").is_dir()

    alone = tmp_path / "alone"
    alone.mkdir()
    arguments = json.loads((tmp_path / "launch/training_args.json").read_text())
    arguments["per_device_train_batch_size"] *= 2
    (alone / "training_args.json").write_text(json.dumps(arguments | {"output_dir": "alone/out"}))
    (alone / "distributed_config.json").write_text("{}")
    together = run([sys.executable, str(EXAMPLE), "alone", model, *adapter], tmp_path)
    assert numbers(split) == pytest.approx(numbers(together), rel=1e-4)
