"""Rows of mosaicml/llm-foundry: MPT models from 1 to 70 billion weights under FSDP1 on A100s and H100s.

scripts/train/benchmarking/README.md at commit 061f2c7c. Tokens per second alone. MPT of that time is GPT-2 with biases
and learned positions: the numbers of weights that the README gives are those of GPT-2 to the last one. Its cross
entropy is flash-attn's (llmfoundry/models/mpt/modeling_mpt.py, ``fused_crossentropy``), which keeps the 16-bit logits
and writes their gradient over them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.outside import kernels
from toolkit.planning.loops import LOOPS
from toolkit.planning.predict import Planner
from toolkit.planning.segments import Segment
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve

SOURCE = "mosaicml/llm-foundry"
KIND = "tokens_per_second_per_gpu"
SHAPES = {"1b": (2048, 24, 16), "3b": (2560, 32, 20), "7b": (4096, 32, 32), "13b": (5120, 40, 40),
          "30b": (7168, 48, 56), "70b": (8192, 80, 64)}  # fmt: skip
"""Width, layers and heads (scripts/train/yamls/pretrain/mpt-*.yaml)."""
WORDS = 50368


def why_left_out(row: dict[str, Any]) -> str:
    """Why a row is not predicted; empty if it is."""
    return "throughput alone"


def why_not_timed(row: dict[str, Any]) -> str:
    """Why no time is predicted for a row; empty if it is."""
    return ""


def config(row: dict[str, Any]) -> dict[str, Any]:
    """GPT-2 of the row's size."""
    width, layers, heads = SHAPES[row["model"].removeprefix("MPT-")]
    return {
        "model_type": "gpt2", "n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": row["seq_len"],
        "vocab_size": WORDS, "activation_function": "gelu", "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
        "tie_word_embeddings": True,
    }  # fmt: skip


def recipe(row: dict[str, Any]) -> dict[str, Any]:
    """The recipe that says what the row says."""
    nodes = -(-row["world"] // 8)
    return {
        "model": {"config": config(row), "attention": "flash_attention_2"},
        "tokenizer": {"path": "none"},
        "data": {"train": "none", "max_length": row["seq_len"]},
        "batch": {"micro_size": row["micro_batch"], "accumulation": row["grad_accum"]},
        "precision": "bf16",
        "activation_checkpointing": "full" if row["gradient_checkpointing"] else "none",
        "strategy": {"name": "fsdp1"},
        "machine": {"device": "cuda", "processes": row["world"] // nodes, "nodes": nodes},
        "run": {"max_steps": 2},
    }


@contextlib.contextmanager
def planned(row: dict[str, Any]) -> Iterator[tuple[Planner, Resolved]]:
    """The row's planner and recipe."""
    resolved = resolve(Recipe.model_validate(recipe(row)), "row", device="cuda")
    yield Planner.of(resolved, row["seq_len"], replace(LOOPS["toolkit"], loss=_loss)), resolved


def segments(planner: Planner, resolved: Resolved) -> list[Segment]:
    """Segments with the attention of that time: Triton's form of the first FlashAttention, or its own."""
    found = []
    for one in planner.segments_of(resolved):
        attention = {kernel._replace(name="flash1"): count for kernel, count in one.work.attention.items()}
        found.append(replace(one, work=replace(one.work, attention=attention)))
    return found


def _loss(model: Any, config: Any, tensors: Any, task: str, terms: Any) -> torch.Tensor:
    logits = model(input_ids=tensors["input_ids"]).logits
    losses: torch.Tensor = kernels.FastLoss.apply(logits.view(-1, logits.shape[-1]))
    return losses.sum()
