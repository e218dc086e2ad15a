"""The launch files, written from a resolved recipe. No value is left at "auto"."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from toolkit.launch.hosts import hosts_script
from toolkit.launch.training_args import training_args
from toolkit.recipe.needs import cpus_per_node
from toolkit.recipe.resolve import Resolved
from toolkit.strategies import strategy_of

_PORT = 29500


def launch_files(
    resolved: Resolved,
    folder: str | Path,
    recipe_file: str,
    overrides: Sequence[str] = (),
    *,
    stay: bool = False,
) -> dict[str, str]:
    """File names and contents of the launch files, to be written into ``folder``.

    launch.sh trains ``recipe_file`` with ``overrides``. accelerate resolves the path of deepspeed.json relative to the
    working directory, not to its YAML file. ``stay``: the files are used on this machine, so the path is absolute and
    any working directory will do; without it the path is written as ``folder`` is given. The scripts find the file
    beside themselves.
    """
    home = _home(folder, recipe_file)
    files = {
        "accelerate.yaml": _accelerate_yaml(resolved, Path(folder).absolute() if stay else folder),
        "training_args.json": as_json(training_args(resolved)),
        "launch.sh": launch_script(resolved, recipe_file, overrides, home),
    }
    if accelerate_leaves_apart(resolved):
        files[SCRIPTS] = own_script(resolved)
    deepspeed = strategy_of(resolved).deepspeed_config(resolved)
    if deepspeed is not None:
        files["deepspeed.json"] = as_json(deepspeed)
    if resolved.recipe.machine.nodes > 1:
        files["slurm.sbatch"] = slurm_script(resolved, folder)
        files["launch-hosts.sh"] = hosts_script(
            _summary(resolved), resolved.recipe.machine.nodes, resolved.recipe.run.output_dir, home
        )
        files["launch-elastic.sh"] = elastic_script(resolved, recipe_file, overrides, home)
    return files


def _accelerate_yaml(resolved: Resolved, folder: str | Path) -> str:
    config = accelerate_config(resolved, folder)
    named = config.get("deepspeed_config", {}).get("deepspeed_config_file")
    about = []
    if named is not None:
        where = "relative to the folder in which `accelerate launch` is started."
        if Path(named).is_absolute():
            where = "where deepspeed.json is on this machine: correct it if you move these files."
        about += [f"deepspeed_config_file is {where}", "launch.sh takes the deepspeed.json beside itself."]
    if accelerate_leaves_apart(resolved):
        about += [f"Without a GPU start your own scripts with {SCRIPTS}: accelerate does not connect their processes."]
    return "".join(f"# {line}\n" for line in about) + yaml.safe_dump(config, sort_keys=False)


SCRIPTS = "launch-script.sh"


def accelerate_leaves_apart(resolved: Resolved) -> bool:
    """Whether accelerate 1.15.0 lets each process of a script train alone, without a word: where there is no GPU. The
    toolkit's own runs are connected (toolkit/strategies/engines/connect.py)."""
    return resolved.device == "cpu" and resolved.world_size > 1


def _home(folder: str | Path, recipe_file: str) -> str:
    """Shell that goes to the folder that the recipe's relative paths refer to."""
    if Path(recipe_file).is_absolute():
        return _WORKDIR
    back = os.path.relpath(Path.cwd(), folder)
    recipe = shlex.quote(f"/{back}/{recipe_file}")
    return (
        "# Paths are relative to WORKDIR; else to the folder that these files were written from, if its recipe is "
        "there;\n# else to the current folder.\n"
        'if [ -n "${WORKDIR:-}" ]; then\n  cd "$WORKDIR"\n'
        f'elif [ -e "$here"{recipe} ]; then\n  cd "$here"{shlex.quote(f"/{back}")}\nfi'
    )


def write_files(files: dict[str, str], folder: str | Path) -> list[Path]:
    """Write the files into ``folder``, which is created if needed; returns their paths. Raises OSError."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, content in files.items():
        path = folder / name
        path.write_text(content, encoding="utf-8")
        if name.endswith(".sh"):
            path.chmod(0o755)
        paths.append(path)
    return paths


def accelerate_config(resolved: Resolved, folder: str | Path) -> dict[str, Any]:
    """accelerate.yaml. Without a GPU it still says ``use_cpu: false``: with ``use_cpu: true`` accelerate 1.15.0
    starts one process, whatever ``num_processes`` says."""
    strategy = strategy_of(resolved)
    machine = resolved.recipe.machine
    kind = strategy.distributed_type
    if kind == "MULTI_GPU" and resolved.world_size == 1:
        kind = "NO"  # accelerate refuses MULTI_GPU with one process; DDP of one connects by itself
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": kind,
    }
    if kind != "DEEPSPEED":
        # accelerate rejects a precision next to a deepspeed_config_file; the JSON sets it.
        config["mixed_precision"] = _mixed_precision(resolved)
    config |= strategy.accelerate_config(resolved, Path(folder))
    config |= {
        "downcast_bf16": "no",
        "enable_cpu_affinity": False,
        "machine_rank": 0,
        "main_training_function": "main",
        "num_machines": machine.nodes,
        "num_processes": resolved.world_size,
        "rdzv_backend": "static",
        # accelerate 1.15.0 gives torchrun's rendezvous no address where this says true.
        "same_network": machine.nodes == 1,
        "use_cpu": resolved.device == "cpu" and kind == "NO",
        # 0: any free port, so that two runs on one machine do not collide
        "main_process_port": _PORT if machine.nodes > 1 else 0,
    }
    if machine.nodes > 1:
        config["main_process_ip"] = "127.0.0.1"
    return config


def _mixed_precision(resolved: Resolved) -> str:
    names = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}
    return names[resolved.precision.compute] if resolved.precision.mixed else "no"


def launch_script(resolved: Resolved, recipe_file: str, overrides: Sequence[str], home: str) -> str:
    """launch.sh: with one node, the job itself; with several, start it on each with its rank and the first node's
    address. ``home``: see ``_home``."""
    command = _command(resolved)
    header = ["#!/usr/bin/env bash", f"# {_summary(resolved)}"]
    body = ["set -euo pipefail", _HERE, home]
    if resolved.recipe.machine.nodes > 1:
        header.append("# On each node: NODE_RANK=<0 to nodes - 1> MAIN_IP=<address of node 0> ./launch.sh [--resume]")
        body.append(': "${NODE_RANK:?this node, from 0}" "${MAIN_IP:?address of node 0}"')
        command += ' --machine_rank "$NODE_RANK" --main_process_ip "$MAIN_IP"'
    return "\n".join([*header, *body, *_SIGNALS, *_threads(resolved), _exec(command, recipe_file, overrides), ""])


def _command(resolved: Resolved) -> str:
    command = 'accelerate launch --config_file "$here/accelerate.yaml"'
    if strategy_of(resolved).distributed_type == "DEEPSPEED":
        # Over the path in accelerate.yaml, which the folder may have been moved away from.
        command += ' \\\n  --deepspeed_config_file "$here/deepspeed.json"'
    return command


def own_script(resolved: Resolved) -> str:
    """launch-script.sh: a script of the user's own on a CPU, with its processes connected."""
    several = resolved.recipe.machine.nodes > 1
    ranks = ' --machine_rank "$NODE_RANK" --main_process_ip "$MAIN_IP"' if several else ""
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            f"# {_summary(resolved)}",
            "# Your own script without a GPU: launch-script.sh SCRIPT [ARGUMENTS], or -m MODULE in place of SCRIPT.",
            "# accelerate alone does not connect its processes, and each would train by itself.",
            "set -euo pipefail",
            _HERE,
            *([': "${NODE_RANK:?this node, from 0}" "${MAIN_IP:?address of node 0}"'] if several else []),
            *_threads(resolved),
            f'exec {_command(resolved)}{ranks} \\\n  -m toolkit.connected "$@"',
            "",
        ]
    )


def elastic_script(resolved: Resolved, recipe_file: str, overrides: Sequence[str], home: str) -> str:
    """launch-elastic.sh: torchrun's own rendezvous. When a rank or node is lost, all resume from the latest checkpoint
    once it is available again."""
    command = (
        f'{_command(resolved)} --machine_rank "$NODE_RANK" \\\n'
        '  --main_process_ip "$MAIN_IP" --rdzv_backend c10d --rdzv_conf "is_host=$((NODE_RANK == 0))" \\\n'
        '  --max_restarts "${MAX_RESTARTS:-3}"'
    )
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            f"# {_summary(resolved)}",
            "# On each node: NODE_RANK=<0 to nodes - 1> MAIN_IP=<address of node 0> ./launch-elastic.sh",
            "# Resumes from the latest checkpoint: when a rank dies, all ranks restart, up to MAX_RESTARTS times.",
            "set -euo pipefail",
            _HERE,
            home,
            ': "${NODE_RANK:?this node, from 0}" "${MAIN_IP:?address of node 0}"',
            *_SIGNALS,
            *_threads(resolved),
            # The agents' restart counts differ between nodes: an agent that lost no rank of its own counts no restart.
            "export TOOLKIT_RENDEZVOUS=c10d",
            _exec(command, recipe_file, [*overrides, "--resume"]),
            "",
        ]
    )


_HERE = 'here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)'
_WORKDIR = '[ -z "${WORKDIR:-}" ] || cd "$WORKDIR"'
_SIGNALS = (
    "# USR1 would end the launcher, so only the ranks receive it. The launcher forwards SIGTERM and "
    "waits for the save.",
    "trap '' USR1",
    "export PET_SHUTDOWN_TIMEOUT=${PET_SHUTDOWN_TIMEOUT:-600}",
)


def _threads(resolved: Resolved) -> list[str]:
    """OMP_NUM_THREADS, computed on the node where the script runs, like `machine.cpu_count`. By default accelerate
    1.15.0 sets 1, and an optimizer in host memory then runs on one core."""
    processes = resolved.recipe.machine.processes
    return [
        f"# Threads per process: the cores available on this node (affinity, cgroup), divided by {processes}.",
        'if [ -z "${OMP_NUM_THREADS:-}" ]; then',
        "  cores=$(nproc)",
        '  if read -r quota period 2> /dev/null < /sys/fs/cgroup/cpu.max && [ "$quota" != max ]; then',
        '    [ $((quota / period)) -ge "$cores" ] || cores=$((quota / period))',
        "  fi",
        f"  export OMP_NUM_THREADS=$((cores > {processes} ? cores / {processes} : 1))",
        "fi",
    ]


def _exec(command: str, recipe_file: str, overrides: Sequence[str]) -> str:
    return f'exec {command} \\\n  -m toolkit.train {_job(recipe_file, overrides)} "$@"'


def slurm_script(resolved: Resolved, folder: str | Path) -> str:
    """slurm.sbatch: runs launch.sh once per node, with the first node as rendezvous. Slurm signals the run before its
    time limit (or preemption); it saves, and the job is requeued and resumes."""
    machine = resolved.recipe.machine
    gpus = [f"#SBATCH --gpus-per-node={machine.processes}"] if resolved.device == "cuda" else []
    marked = shlex.quote(f"{resolved.recipe.run.output_dir}/stopped.json")
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            f"# {_summary(resolved)}",
            "# Submit from the folder that the recipe's relative paths refer to:",
            "#   sbatch " + shlex.quote(f"{folder}/slurm.sbatch") + " [--resume [--extend]]",
            f"#SBATCH --nodes={machine.nodes}",
            "#SBATCH --ntasks-per-node=1",
            *gpus,
            "# The minimum: one core per process of a node and per data worker. More cores speed up an optimizer",
            "# in host memory: sbatch --cpus-per-task=N; launch.sh divides them among the processes.",
            f"#SBATCH --cpus-per-task={cpus_per_node(resolved.recipe)}",
            "#SBATCH --output=%x-%j.out",
            "#SBATCH --open-mode=append",
            "#SBATCH --requeue",
            "# Two minutes to finish a step and to save; increase this for a longer step or save.",
            "#SBATCH --signal=USR1@120",
            "set -euo pipefail",
            'nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")',
            "export MAIN_IP=${nodes%%$'\\n'*}",
            "# srun does not inherit --cpus-per-task from sbatch (Slurm 22.05 and later).",
            '[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK',
            'resume=("$@")',
            'if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then resume=(--resume "$@"); fi',
            "status=0",
            "# shellcheck disable=SC2016  # a node's own shell expands them",
            'srun --kill-on-bad-exit=1 bash -c \'NODE_RANK=$SLURM_NODEID exec "$0" "$@"\' '
            + shlex.quote(f"{folder}/launch.sh")
            + ' ${resume[@]+"${resume[@]}"} || status=$?',
            "# A stopped run leaves this file; a resumed run removes it.",
            f'if [ "$status" -ne 0 ] && [ -e {marked} ]; then scontrol requeue "$SLURM_JOB_ID"; fi',
            'exit "$status"',
            "",
        ]
    )


def _job(recipe_file: str, overrides: Sequence[str]) -> str:
    return " ".join(shlex.quote(part) for part in (recipe_file, *overrides))


def _summary(resolved: Resolved) -> str:
    recipe = resolved.recipe
    model = recipe.model.path or (recipe.model.config or {})["model_type"]
    batch = f"{resolved.micro_size} micro x {resolved.accumulation} accumulation x {parts(resolved)}"
    return f"{model}, {recipe.strategy.name}, {recipe.precision}, global batch {resolved.global_size} = {batch}"


def parts(resolved: Resolved) -> str:
    """The last factor of the global batch."""
    if resolved.data_size == resolved.world_size:
        return f"{resolved.world_size} processes"
    return f"{resolved.data_size} data-parallel ranks"


def as_json(value: Any) -> str:
    """A file's contents."""
    return json.dumps(value, indent=2) + "\n"
