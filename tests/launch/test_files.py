"""The launch files: nothing auto, one meaning per value, and accepted by the real packages."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from jobs import resolved_from
from tiny import recipe_dict
from toolkit.launch.files import launch_files, write_files
from toolkit.strategies import strategies

CASES = [
    *((name, "none", precision) for name in strategies() for precision in ("fp32", "bf16", "fp16", "bf16-pure")),
    ("zero1", "optimizer", "bf16"),
    ("zero2", "optimizer", "bf16"),
    ("zero3", "optimizer", "bf16"),
    ("zero3", "all", "fp16"),
    ("fsdp1", "all", "bf16"),
    ("fsdp2", "all", "bf16"),
]


def files_for(strategy: str, offload: str, precision: str, root: Path, folder: str = "out", **machine: Any) -> Any:
    processes = 1 if strategy == "single" else 2
    recipe = recipe_dict(
        root,
        strategy={"name": strategy, "offload": offload},
        precision=precision,
        machine={"device": "cuda", "processes": processes} | machine,
        run={"save_every": 10},
    )
    resolved = resolved_from(recipe)
    return resolved, launch_files(resolved, folder, "recipe.yaml", ["run.seed=1"])


@pytest.mark.parametrize(("strategy", "offload", "precision"), CASES)
def test_nothing_is_auto_and_values_agree(strategy: str, offload: str, precision: str, tiny_root: Path) -> None:
    resolved, files = files_for(strategy, offload, precision, tiny_root)
    accelerate = yaml.safe_load(files["accelerate.yaml"])
    arguments = json.loads(files["training_args.json"])
    assert all('"auto"' not in content and ": auto" not in content for content in files.values())
    assert accelerate["num_processes"] == resolved.world_size
    assert arguments["max_grad_norm"] == 1.0
    assert arguments["gradient_accumulation_steps"] == resolved.accumulation
    assert (arguments["bf16"], arguments["fp16"]) == (precision == "bf16", precision == "fp16")
    assert ("deepspeed.json" in files) == strategy.startswith("zero")
    if strategy.startswith("zero"):
        deepspeed = json.loads(files["deepspeed.json"])
        assert "mixed_precision" not in accelerate, "accelerate refuses it beside deepspeed_config_file"
        assert deepspeed["gradient_clipping"] == arguments["max_grad_norm"]
        assert deepspeed["gradient_accumulation_steps"] == arguments["gradient_accumulation_steps"]
        assert deepspeed["train_micro_batch_size_per_gpu"] == arguments["per_device_train_batch_size"]
        assert deepspeed["train_batch_size"] == resolved.global_size
        assert deepspeed["zero_optimization"]["stage"] == int(strategy[-1])
        assert deepspeed["bf16"]["enabled"] == precision.startswith("bf16")
        assert ("offload_param" in deepspeed["zero_optimization"]) == (offload == "all")
    if strategy.startswith("fsdp"):
        fsdp = accelerate["fsdp_config"]
        assert fsdp["fsdp_version"] == int(strategy[-1])
        assert fsdp["fsdp_transformer_layer_cls_to_wrap"] == "LlamaDecoderLayer"
        assert fsdp["fsdp_offload_params"] == (offload == "all")


@pytest.mark.parametrize(("strategy", "offload", "precision"), CASES)
def test_the_real_packages_accept_them(
    strategy: str, offload: str, precision: str, tiny_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    _, files = files_for(strategy, offload, precision, tiny_root, str(tmp_path))
    write_files(files, tmp_path)
    config = load_config_from_file(str(tmp_path / "accelerate.yaml"))
    assert config.num_processes == (1 if strategy == "single" else 2)
    if strategy.startswith("zero"):
        from deepspeed.runtime.config import DeepSpeedConfig

        monkeypatch.setenv("WORLD_SIZE", "1")
        content = json.loads(files["deepspeed.json"])
        # DeepSpeed checks the product against the processes that it finds, here one.
        content["train_batch_size"] //= 2
        parsed = DeepSpeedConfig(content)
        assert parsed.zero_optimization_stage == int(strategy[-1])
        assert parsed.gradient_clipping == 1.0
    if precision in ("fp32", "bf16-pure"):
        from transformers import TrainingArguments

        arguments = json.loads(files["training_args.json"]) | {"use_cpu": True, "output_dir": str(tmp_path)}
        assert TrainingArguments(**arguments).warmup_steps == 2


def test_several_nodes_get_scripts_that_are_shell(tiny_root: Path, tmp_path: Path) -> None:
    _, files = files_for("fsdp2", "none", "bf16", tiny_root, "my launch", nodes=2)
    scripts = {"launch.sh", "launch-hosts.sh", "launch-elastic.sh", "slurm.sbatch"}
    assert set(files) == {"accelerate.yaml", "training_args.json"} | scripts
    config = yaml.safe_load(files["accelerate.yaml"])
    assert (config["num_machines"], config["num_processes"], config["main_process_port"]) == (2, 4, 29500)
    write_files(files, tmp_path / "my launch")
    for script in scripts:
        subprocess.run(["bash", "-n", tmp_path / "my launch" / script], check=True, timeout=10)
    told = subprocess.run(
        [tmp_path / "my launch" / "launch.sh"], capture_output=True, text=True, timeout=10, check=False
    )
    assert told.returncode != 0
    assert "NODE_RANK" in told.stderr


def test_the_slurm_script_starts_each_node_with_its_rank(tiny_root: Path, tmp_path: Path) -> None:
    _, files = files_for("fsdp2", "none", "bf16", tiny_root, "my launch", nodes=2)
    write_files(files, tmp_path / "my launch")
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, body in {
        "scontrol": "echo nodeA",
        # Slurm's srun: once per node, with the node's number
        "srun": 'shift; for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done',
        "accelerate": 'echo "$@"',
    }.items():
        (commands / name).write_text(f"#!/bin/bash\n{body}\n")
        (commands / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{commands}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node[A-B]"}
    script = tmp_path / "my launch" / "slurm.sbatch"
    told = subprocess.run(
        ["bash", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=20, check=True
    )
    for rank, line in enumerate(told.stdout.splitlines()):
        assert f"--machine_rank {rank} --main_process_ip nodeA" in line
        assert line.endswith("-m toolkit.train recipe.yaml run.seed=1")
    assert len(told.stdout.splitlines()) == 2
