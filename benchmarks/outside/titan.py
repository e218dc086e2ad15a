"""Rows of pytorch/torchtitan and pytorch/ao: Llama 3 8B under FSDP2 on H100s, blocks compiled, in bfloat16.

benchmarks/llama3_h100_202412_torchtitan.md (commit b5bcd76c) and torchao's docs/source/workflows/training.md
(36027d82). «Selective per-op» recomputes every second matrix product, no attention, and what is between
(torchtitan 0.1, models/llama3/infra/parallelize.py, ``_apply_ac_to_transformer_block``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.outside.models import MODELS
from toolkit.planning.hardware import Device
from toolkit.planning.predict import Planner
from toolkit.planning.segments import Segment
from toolkit.planning.work import Work
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve, strategy_of

SOURCES = ("pytorch/torchtitan", "pytorch/ao")
HBM2E = 2400
"""GB/s of its H100s («Hardware» of that file); nodes are linked by 400 Gb/s for each of eight GPUs, and power is
limited to 500 of 700 W, for which nothing is taken off."""
CONFIG = MODELS["meta-llama/Meta-Llama-3-8B"]


def why_not_timed(row: dict[str, Any]) -> str:
    """Why no time is predicted for a row; empty if it is."""
    if row.get("quantization"):
        return "float8 products: no rate of them"
    if row["strategy"] != "fsdp2":
        return "tensor or context parallelism of torchtitan's own"
    return ""


def device(row: dict[str, Any], known: Device) -> Device:
    """The H100 of that file."""
    return replace(known, bandwidth=HBM2E) if "HBM2e" in row["gpu"] else known


def recipe(row: dict[str, Any]) -> dict[str, Any]:
    """The recipe that says what the row says, without what is recomputed."""
    nodes = -(-row["world"] // 8)
    return {
        "model": {"config": CONFIG, "attention": "flash_attention_2"},
        "tokenizer": {"path": "none"},
        "data": {"train": "none", "max_length": row["seq_len"]},
        "batch": {"micro_size": row["micro_batch"], "accumulation": row["grad_accum"]},
        "precision": "bf16",
        "optimizer": {"kernel": "foreach" if "foreach" in row["optimizer"] else "fused", "decay": "all"},
        "activation_checkpointing": "none",
        "strategy": {"name": "fsdp2"},
        "compile": row["compile"],
        "machine": {"device": "cuda", "processes": row["world"] // nodes, "nodes": nodes},
        "run": {"max_steps": 2},
    }


@contextlib.contextmanager
def planned(row: dict[str, Any]) -> Iterator[tuple[Planner, Resolved]]:
    """The row's planner and recipe."""
    resolved = resolve(Recipe.model_validate(recipe(row)), "row", device="cuda")
    yield Planner.of(resolved, row["seq_len"]), resolved


def segments(planner: Planner, resolved: Resolved) -> list[Segment]:
    """Segments with what «selective per-op» recomputes."""
    compute = strategy_of(resolved).memory_model().compute_as
    kept = planner.segments("none", resolved.micro_size, compute)
    again = planner.segments("full", resolved.micro_size, compute)
    found = []
    for one, other in zip(kept, again, strict=True):
        more = other.work + one.work * -1
        half = Work(more.products / 2, more.wide / 2, more.operands / 2, more.moved, more.kernels)
        found.append(replace(one, work=one.work + half))
    return found
