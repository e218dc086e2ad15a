"""Files for the Trainer on a model that transformers splits: distributed_config.json for ``from_pretrained``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from toolkit.errors import InputError
from toolkit.launch.files import SCRIPTS, accelerate_config, accelerate_leaves_apart, as_json, own_script
from toolkit.launch.training_args import training_args
from toolkit.recipe.resolve import Resolved
from toolkit.rooms import asked_options
from toolkit.strategies.fsdp import FsdpSettings
from toolkit.upstream.transformers import why_trainer_takes_no_split


def split_files(resolved: Resolved, folder: str | Path) -> dict[str, str]:
    """File names and contents: distributed_config.json, training_args.json, and accelerate.yaml, which starts processes
    and divides nothing. Raises InputError with every reason why the Trainer cannot train the recipe so."""
    _check(resolved)
    files = {
        "accelerate.yaml": yaml.safe_dump(_processes(resolved, folder), sort_keys=False),
        "distributed_config.json": as_json(distributed_config(resolved)),
        "training_args.json": as_json(_arguments(resolved)),
    }
    return files | ({SCRIPTS: own_script(resolved)} if accelerate_leaves_apart(resolved) else {})


def distributed_config(resolved: Resolved) -> dict[str, Any]:
    """Keyword arguments of transformers' DistributedConfig."""
    copies = {"dp_replicate_size": resolved.mesh.replicate} if resolved.mesh.replicate > 1 else {}
    return copies | {"fsdp_size": resolved.mesh.shard, "fsdp_mixed_precision": resolved.precision.mixed}


def split_notes(resolved: Resolved) -> list[str]:
    """What the script has to do itself, and what the Trainer cannot; raises InputError as ``split_files``."""
    _check(resolved)
    call = "from_pretrained(MODEL, dtype=torch.float32, distributed_config=json.load(open('distributed_config.json')))"
    notes = [f"load the model with {call}: the optimizer updates weights in float32"]
    if resolved.recipe.run.save_every:
        notes.append("training_args.json has save_only_model: the Trainer does not resume a run of such a model")
    if resolved.recipe.adapter is not None:
        notes.append("add the adapter after loading: it stays whole on every process, and is not sharded")
    return notes


def _arguments(resolved: Resolved) -> dict[str, Any]:
    """training_args.json. FSDP2 computes in 16 bits by itself: with ``bf16`` the Trainer would add autocast."""
    arguments = training_args(resolved) | {"bf16": False, "fp16": False}
    return arguments | ({"save_only_model": True} if arguments["save_strategy"] != "no" else {})


def _processes(resolved: Resolved, folder: str | Path) -> dict[str, Any]:
    config = accelerate_config(resolved, folder) | {"distributed_type": "MULTI_GPU", "mixed_precision": "no"}
    return {key: value for key, value in config.items() if key not in ("fsdp_config", "parallelism_config")}


def _check(resolved: Resolved) -> None:
    recipe, strategy = resolved.recipe, resolved.recipe.strategy
    problems = []
    if not (isinstance(resolved.settings, FsdpSettings) and resolved.settings.version == 2):
        problems.append(f"strategy.name: {strategy.name}; transformers splits models with FSDP2: set fsdp2")
    if resolved.world_size < 2:
        problems.append("machine.processes: 1; there is nothing to divide: set at least 2")
    problems += [f"strategy.mesh.{axis}: the Trainer is not proven with it; set 1" for axis in resolved.mesh.axes]
    if strategy.offload != "none":
        problems.append(f"strategy.offload: {strategy.offload}; the Trainer is not proven with it; set none")
    if not strategy.reshard_after_forward:
        problems.append("strategy.reshard_after_forward: false; transformers has a plan of its own for each model")
    problems += [f"{option.key}: {option.not_split}" for option, _ in asked_options(recipe) if option.not_split]
    if recipe.precision not in ("fp32", "bf16"):
        problems.append(f"precision: {recipe.precision}; DistributedConfig has bf16 over float32 weights, or none")
    if recipe.adapter is not None and recipe.adapter.method != "lora":
        problems.append(f"adapter.method: {recipe.adapter.method}; the Trainer is proven with lora alone")
    if reason := why_trainer_takes_no_split(adapter=recipe.adapter is not None):
        problems.append(reason)
    if problems:
        raise InputError(*(f"{resolved.source}: --for transformers: {problem}" for problem in problems))
