"""Rows of huggingface/peft: method_comparison/MetaMathQA/run.py, Llama-3.2-3B on an L40S, four samples a batch.

Read at commit 5d602fdb. Measured is the mean over the steps of ``torch.cuda.memory_allocated`` after the optimizer's
step: weights, gradients, moments, and the logits of the batch, which ``outputs`` holds. The peak is not recorded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from benchmarks.outside.fms import WORKSPACE
from benchmarks.outside.models import MODELS
from toolkit.planning.loops import LOOPS
from toolkit.planning.predict import Planner
from toolkit.planning.skeleton import build
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve, strategy_of

SOURCE = "huggingface/peft"
KIND = "allocated_after_step_mean_gib"


def why_left_out(row: dict[str, Any]) -> str:
    """Why a row is not predicted; empty if it is."""
    if row["model"] not in MODELS or KIND not in row:
        return "a process' memory, of a configuration that is not complete"
    adapter = row.get("adapter")
    if adapter is not None and (adapter["peft_type"] != "LORA" or row["optimizer"] == "lora-fa"):
        return "the method's own options are not in the row"
    if adapter is not None and "bdlora" in row["experiment"]:
        return "the method's own options are not in the row"
    return ""


def why_not_timed(row: dict[str, Any]) -> str:
    """Why no time is predicted for a row; empty if it is."""
    return why_left_out(row)


def recipe(row: dict[str, Any]) -> dict[str, Any]:
    """The recipe that says what the row says; rows are as long as a sample is in the mean, without padding."""
    adapter = None
    if (found := row.get("adapter")) is not None:
        method = "dora" if "dora" in row["experiment"] else "lora"
        adapter = {"method": method, "r": found["r"], "target_modules": found["target_modules"]}
    return {
        "model": {"config": MODELS[row["model"]]},
        "tokenizer": {"path": "none"},
        "data": {"train": "none", "max_length": round(row["mean_tokens_per_sample"])},
        "batch": {"micro_size": row["micro_batch"], "accumulation": 1},
        "adapter": adapter,
        "precision": "bf16-pure",
        "optimizer": {"kernel": "foreach", "decay": "all"},
        "strategy": {"name": "single"},
        "machine": {"device": "cuda", "processes": 1},
        "run": {"max_steps": 2},
    }


@contextlib.contextmanager
def planned(row: dict[str, Any]) -> Iterator[tuple[Planner, Resolved]]:
    """The row's planner and recipe, rows of the mean length."""
    resolved = resolve(Recipe.model_validate(recipe(row)), "row", device="cuda")
    yield Planner.of(resolved, resolved.recipe.data.max_length, "trainer"), resolved


def predicted(row: dict[str, Any]) -> int:
    """Bytes after a step: what stays, the gradients, the logits in bfloat16, cuBLAS' workspaces."""
    resolved = LOOPS["trainer"].trained(resolve(Recipe.model_validate(recipe(row)), "row", device="cuda"))
    skeleton = build(resolved)
    held = strategy_of(resolved).memory_model()(skeleton.holdings, resolved)
    tokens = row["micro_batch"] * resolved.recipe.data.max_length
    gradients = held.trains * held.trained
    return sum(held.resident.values()) + gradients + 2 * tokens * skeleton.contents().vocabulary + WORKSPACE
