"""Rows of pytorch/torchtune: README.md at commit 1814feb1, Llama-3.2-3B on an A100 of 80 GB. Measured are active
bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from benchmarks.outside.fms import WORKSPACE
from benchmarks.outside.loops import TORCHTUNE
from benchmarks.outside.models import MODELS
from toolkit.planning.predict import Planner
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve

SOURCE = "pytorch/torchtune"
KIND = "peak_active_gib"
CONFIG = MODELS["meta-llama/Llama-3.2-3B"]
_LAYERS = {"output_proj": ("o_proj",), "mlp (gate,up,down)": ("gate_proj", "up_proj", "down_proj")}


def why_left_out(row: dict[str, Any]) -> str:
    """Why a row is not predicted; empty if it is."""
    if "3B" not in row["model"]:
        return "a configuration that is not complete"
    if row.get("activation_offload"):
        return "activations offloaded by torchtune's own streams: no memory model"
    if row.get("compile") and not row["gradient_checkpointing"]:
        return "what compiled layers keep for the backward: no memory model"
    return ""


def why_not_timed(row: dict[str, Any]) -> str:
    """Why no time is predicted for a row; empty if it is."""
    if "3B" not in row["model"]:
        return "a configuration that is not complete"
    return ""


def recipe(row: dict[str, Any]) -> dict[str, Any]:
    """The recipe that says what the row says."""
    adapter = None
    if row["task"] == "lora":
        found = row["adapter"]
        targets = [name for target in found["target_modules"] for name in _LAYERS.get(target, (target,))]
        adapter = {"method": "lora", "r": found["r"], "alpha": float(found["lora_alpha"]), "target_modules": targets}
    return {
        "model": {"config": CONFIG},
        "adapter": adapter,
        "compile": row["compile"],
        "tokenizer": {"path": "none"},
        "data": {"train": "none", "max_length": row["seq_len"]},
        "batch": {"micro_size": row["micro_batch"], "accumulation": row["grad_accum"]},
        "precision": "bf16-pure",
        "optimizer": {"decay": "all"},
        "activation_checkpointing": "full" if row["gradient_checkpointing"] else "none",
        "strategy": {"name": "single"},
        "machine": {"device": "cuda", "processes": 1},
        "run": {"max_steps": 2},
    }


@contextlib.contextmanager
def planned(row: dict[str, Any]) -> Iterator[tuple[Planner, Resolved]]:
    """The row's planner and recipe."""
    resolved = resolve(Recipe.model_validate(recipe(row)), "row", device="cuda")
    yield Planner.of(resolved, row["seq_len"], TORCHTUNE), resolved


def predicted(row: dict[str, Any]) -> int:
    """Bytes at the peak of a step, with cuBLAS' workspaces."""
    with planned(row) as (planner, resolved):
        return planner.memory(resolved).peak + WORKSPACE
