"""Rows of pytorch/torchtune: README.md at commit 1814feb1, Llama-3.2-3B on an A100 of 80 GB. Measured are active
bytes."""

from __future__ import annotations

from typing import Any

from benchmarks.outside.fms import WORKSPACE
from benchmarks.outside.models import MODELS
from toolkit.planning.predict import Planner
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve

SOURCE = "pytorch/torchtune"
KIND = "peak_active_gib"
CONFIG = MODELS["meta-llama/Llama-3.2-3B"]


def why_left_out(row: dict[str, Any]) -> str:
    """Why a row is not predicted; empty if it is."""
    if "3B" not in row["model"]:
        return "a configuration that is not complete"
    if row.get("activation_offload"):
        return "activations offloaded by torchtune's own streams: no memory model"
    if row.get("compile") and not row["gradient_checkpointing"]:
        return "what compiled layers keep for the backward: no memory model"
    return ""


def recipe(row: dict[str, Any]) -> dict[str, Any]:
    """The recipe that says what the row says."""
    return {
        "model": {"config": CONFIG},
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


def predicted(row: dict[str, Any]) -> int:
    """Bytes at the peak of a step, with cuBLAS' workspaces."""
    resolved = resolve(Recipe.model_validate(recipe(row)), "row", device="cuda")
    return Planner.of(resolved, row["seq_len"], "torchtune").memory(resolved).peak + WORKSPACE
