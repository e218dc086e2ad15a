"""Rows of AnswerDotAI/fsdp_qlora: train.py on two GPUs, transformers' Llama and Mistral under FSDP1 with LoRA.

benchmarks_03_2024.md at commit 05ed9f2a and train.py at 02586ac7; torch 2.2. The version of transformers is not named:
that logits are in float32, and copied without the last position, is taken from 4.45 and 4.48. Dummy rows of a fixed
length. Measured is ``max_memory_reserved``; one row has the allocated bytes too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.outside import older
from benchmarks.outside.fms import entering
from benchmarks.outside.models import MODELS
from toolkit.planning.allocator import Parts
from toolkit.planning.loops import LOOPS, Loop
from toolkit.planning.loops.base import as_resolved
from toolkit.planning.loops.trainer import linear4bit
from toolkit.planning.predict import Planner
from toolkit.planning.unneeded import without
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve

SOURCE = "AnswerDotAI/fsdp_qlora"
KIND = "peak_reserved_gib"
_LAYERS = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "up": "up_proj", "down": "down_proj", "gate": "gate_proj"}


def why_left_out(row: dict[str, Any]) -> str:
    """Why a row is not predicted; empty if it is."""
    return "" if row["model"] in MODELS else "a model without a config here"


def why_not_timed(row: dict[str, Any]) -> str:
    """Why no time is predicted for a row; empty if it is."""
    return why_left_out(row)


def recipe(row: dict[str, Any]) -> dict[str, Any]:
    """The recipe that says what the row says."""
    found = row["adapter"]
    strategy: dict[str, Any] = {"name": "ddp" if "NO_SHARD" in row["strategy"] else "fsdp1"}
    if "offload" in row["strategy"]:
        strategy["offload"] = "all"
    return {
        "model": {"config": MODELS[row["model"]]},
        "tokenizer": {"path": "none"},
        "data": {"train": "none", "max_length": row["seq_len"]},
        "batch": {"micro_size": row["micro_batch"], "accumulation": 1},
        "adapter": {"method": row["task"], "r": found["r"], "alpha": float(found["lora_alpha"]),
                    "dropout": found["lora_dropout"], "target_modules": [_LAYERS[x] for x in found["target_modules"]]},
        "precision": "bf16-pure",
        "optimizer": {"kernel": "foreach", "decay": "all"},
        "activation_checkpointing": "full",
        "strategy": strategy,
        "machine": {"device": "cuda", "processes": row["world"]},
        "run": {"max_steps": 2},
    }  # fmt: skip


def loop(row: dict[str, Any]) -> Loop:
    """transformers 4.38's loss, adapters in bfloat16."""
    acting = functools.partial(entering, [older.float_logits, linear4bit])
    return replace(LOOPS["trainer-4.48"], acting=acting, precision=as_resolved)


@contextlib.contextmanager
def planned(row: dict[str, Any]) -> Iterator[tuple[Planner, Resolved]]:
    """The row's planner and recipe, inside the context that its traces need."""
    with without("bitsandbytes"):
        resolved = resolve(Recipe.model_validate(recipe(row)), "row", device="cuda")
        yield Planner.of(resolved, row["seq_len"], loop(row)), resolved


def predicted(row: dict[str, Any]) -> int:
    """Bytes allocated at the peak, cuBLAS' workspaces too."""
    return int(parts(row).peak)


def parts(row: dict[str, Any]) -> Parts:
    """The same, with what the allocator keeps more for; reserved bytes have neither context nor NCCL."""
    with planned(row) as (planner, resolved):
        sharded = "weights" in resolved.traits.shards
        return replace(Parts.of(planner.memory(resolved), "rtx3090", 1, sharded), fixed=0.0)
