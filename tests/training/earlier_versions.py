"""Checkpoints that earlier versions wrote, kept beside this file, and the command that adds one of this version:

    .venv/bin/python tests/training/earlier_versions.py write

Run it whenever a key of toolkit/recipe/schema.py is added, removed or renamed, or its default or choices change, and
commit the folder that it names. Each holds, for zero2 and fsdp2, a checkpoint after three of six steps of a tiny model
on two processes, and the weights and moments at the end of the same run without an interruption.

To keep one of an older commit, run it with that commit's code:

    git worktree add /tmp/older COMMIT
    PYTHONPATH=/tmp/older:/tmp/older/tests .venv/bin/python tests/training/earlier_versions.py write
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

KEPT = Path(__file__).parent / "checkpoints_of_earlier_versions"
STRATEGIES = ("zero2", "fsdp2")
STEPS, SAVED_AT = 6, 3


def recipe_of(strategy: str) -> dict[str, Any]:
    """Only keys that every version knows; paths from within ``KEPT``."""
    model = {
        "model_type": "llama", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 24, "tie_word_embeddings": False,
        "attention_dropout": 0.1,
    }  # fmt: skip
    return {
        "model": {"config": model},
        "tokenizer": {"path": "data/tokenizer"},
        "data": {"train": "data/train.jsonl", "max_length": 32, "workers": 0},
        "batch": {"micro_size": 2, "accumulation": 2},
        "optimizer": {"lr": 1.0e-3, "weight_decay": 0.1},
        "schedule": {"name": "cosine", "warmup_steps": 2},
        "strategy": {"name": strategy},
        "machine": {"device": "cpu", "processes": 2},
        "run": {"max_steps": STEPS, "seed": 3, "output_dir": "run", "save_every": 0},
    }


def kept() -> list[Path]:
    """The folder of every kept version."""
    return sorted(path.parent for path in KEPT.glob("*/about.json"))


def outline() -> dict[str, Any]:
    """Every key of the recipe with its default and, where there is a list of them, its choices."""
    from pydantic import BaseModel

    from toolkit.recipe.schema import Recipe

    found: dict[str, Any] = {}

    def walk(section: type[BaseModel], at: str) -> None:
        for key, field in section.model_fields.items():
            kinds = [field.annotation, *get_args(field.annotation)]
            inner = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
            if inner is not None:
                walk(inner, f"{at}{key}.")
            choices = [part for part in kinds if isinstance(part, str)]
            if field.is_required():
                found[at + key] = {"required": True}
            elif inner is None or field.default is None:
                found[at + key] = {"default": field.get_default(call_default_factory=True)}
            if choices:
                found[at + key]["choices"] = choices

    walk(Recipe, "")
    return json.loads(json.dumps(found))


def train_here(*arguments: Any) -> Any:
    """``jobs.train_job`` of a recipe whose paths start in ``KEPT``; a job of a process group."""
    from jobs import train_job

    before = os.getcwd()
    os.chdir(KEPT)
    try:
        return train_job(*arguments)
    finally:
        os.chdir(before)


def write() -> Path:
    """Keep a checkpoint of the version that is imported; returns its folder, named by date and commit of the code's
    HEAD and by the schema."""
    from safetensors.torch import save_file

    import toolkit
    from jobs import resolved_from
    from toolkit.launch.group import WorkerGroup

    code = Path(toolkit.__file__).parents[1]
    commit = subprocess.run(
        ["git", "-C", str(code), "log", "-1", "--format=%h %cs"], check=True, capture_output=True, text=True
    ).stdout.split()
    schema = outline()
    # The schema's own digest: a change that is not committed yet, or two on two branches, have names of their own.
    digest = hashlib.sha256(json.dumps(schema, sort_keys=True).encode()).hexdigest()[:8]
    folder = KEPT / f"{commit[1]}-{commit[0]}-{digest}"
    if (folder / "about.json").exists():
        sys.exit(f"{folder} is there already: the schema has not changed since")
    with WorkerGroup(2) as group:
        for strategy in STRATEGIES:
            resolved, target = resolved_from(recipe_of(strategy)), folder / strategy
            group.run(train_here, resolved, SAVED_AT, str(target), None, STEPS, timeout=900)
            whole = group.run(train_here, resolved, STEPS, None, None, STEPS, timeout=900)[0]
            tensors = {**{f"weight.{n}": w for n, w in whole.weights.items()}, **whole.moments}
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "end.safetensors")
            (target / "losses.json").write_text(json.dumps(whole.losses) + "\n")
    about = {"commit": commit[0], "schema": schema}
    (folder / "about.json").write_text(json.dumps(about, indent=1) + "\n")
    return folder


if __name__ == "__main__":
    if sys.argv[1:] != ["write"]:
        sys.exit(f"usage: {sys.argv[0]} write")
    sys.path.append(str(Path(__file__).parents[1]))  # after PYTHONPATH: an older commit's own helpers come first
    print(f"wrote {write()}; commit it")
