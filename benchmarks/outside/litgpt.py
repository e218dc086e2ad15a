"""Rows of Lightning-AI/litgpt: its fine-tuning scripts on an A10G and on A100s of 40 GB.

config_hub/finetune/README.md (commit 26857050) with the yaml files beside it, tutorials/resource-tables.md with the
code of commit 8641822. A row is what ``torch.cuda.max_memory_allocated`` says at the end.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from benchmarks.outside.fms import WORKSPACE
from benchmarks.outside.loops import LITGPT
from benchmarks.outside.loops.litgpt import build_model, chunked_loss
from benchmarks.outside.loops.litgpt_model import Style
from benchmarks.outside.models import LITGPT as MODELS
from toolkit.model.packed_layers import PackedLayer
from toolkit.options.nf4 import apply as nf4
from toolkit.planning.loops import Loop
from toolkit.planning.predict import Planner
from toolkit.planning.unneeded import without
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve

SOURCE = "Lightning-AI/litgpt"
KIND = "peak_allocated_gib"
STYLES = {
    # lit_gpt/lora.py of 8641822; rmsnorm.py with 6178c7cc of 2023-10-24, three days before the table: with that of
    # 8641822, which copies nothing to float32, three rows of Llama 2 are 3 to 5 % too low.
    "2023-10": Style(True, False),
    "2024-04": Style(False, False),  # 5895df10, litgpt/model.py and lora.py
    "2024-07": Style(),  # 00af8b0d
}
NEW = ("gemma-2-", "Llama-3.1", "Llama-3.2", "Phi-3")
"""Models whose rows were added after April 2024 (``git log config_hub/finetune/README.md``)."""
_LAYERS = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj", "mlp": "mlp", "head": "lm_head"}


def why_left_out(row: dict[str, Any]) -> str:
    """Why a row is not predicted; empty if it is."""
    if row["model"] not in MODELS:
        return "a model without a config here"
    if row.get("adapter") and row["adapter"]["peft_type"] != "LORA":
        return "LLaMA-Adapter: no memory model"
    if row["world"] > 1 and row.get("adapter"):
        return "FSDP1 sums whole gradients of frozen weights over micro-batches of unknown lengths: no memory model"
    if row["id"] == "m0645":
        return "less than the weights, gradients and moments of its own configuration"
    return ""


def style(row: dict[str, Any]) -> Style:
    """The code that the row ran."""
    if "resource-tables" in row["source_path"]:
        return STYLES["2023-10"]
    return STYLES["2024-07" if any(name in row["model"] for name in NEW) else "2024-04"]


def recipe(row: dict[str, Any]) -> dict[str, Any]:
    """The recipe that says what the row says."""
    adapter = None
    if row["task"] in ("lora", "qlora"):
        found = row["adapter"]
        adapter = {"method": row["task"], "r": found["r"], "alpha": float(found["lora_alpha"]),
                   "dropout": found["lora_dropout"], "target_modules": [_LAYERS[x] for x in found["target_modules"]],
                   }  # fmt: skip
    return {
        "model": {"config": MODELS[row["model"]]},
        "tokenizer": {"path": "none"},
        "data": {"train": "none", "max_length": row["seq_len"]},
        "batch": {"micro_size": row["micro_batch"], "accumulation": row["grad_accum"]},
        "adapter": adapter,
        "precision": "bf16-pure",
        "optimizer": {"decay": "all"},
        "activation_checkpointing": "none" if row["world"] == 1 else "full",
        "strategy": {"name": "single" if row["world"] == 1 else "fsdp1"},
        "machine": {"device": "cuda", "processes": row["world"]},
        "run": {"max_steps": 2},
    }


def loop(row: dict[str, Any]) -> Loop:
    """litgpt's as the row ran it."""
    own, quantised = LITGPT, row["task"] == "qlora"
    first = "resource-tables" in row["source_path"]  # whose longest sample is in the first batch alone
    previous: dict[int, torch.Tensor] = {}

    def loss(model: Any, config: Any, tensors: Any, task: str, terms: Any) -> torch.Tensor:
        try:
            return chunked_loss(model, config, tensors, task, terms, first)
        finally:
            previous.clear()  # with the variable ``loss``

    return replace(
        own,
        loss=loss,
        model=functools.partial(build_model, style=style(row)),
        acting=functools.partial(kept_inputs, None if first else previous) if quantised else own.acting,
    )


class _Product42(torch.autograd.Function):
    """bitsandbytes 0.41 and 0.42, autograd/_functions.py, ``MatMul4Bit``: keeps its input, as an attribute, which no
    backward frees: it goes with the loss, at the end of the next forward. modules.py quantises from float16, so that a
    weight is unpacked in that, and copied. ``previous``: inputs of the micro-batch before, by storage; None: there was
    none."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, layer: PackedLayer, previous: Any) -> torch.Tensor:
        ctx.layer = layer
        if hidden.requires_grad:
            ctx.tensors = hidden
            if previous is not None:
                previous.setdefault(hidden.untyped_storage()._cdata, torch.empty_like(hidden))
        bias = None if layer.bias is None else layer.bias.to(hidden.dtype)
        return functional.linear(hidden, layer.dequantised(hidden.dtype).clone(), bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0].matmul(ctx.layer.dequantised(grads[0].dtype).clone()), None, None


@contextlib.contextmanager
def kept_inputs(previous: dict[int, torch.Tensor] | None, model: Any) -> Iterator[None]:
    """4-bit layers of bitsandbytes 0.42, which litgpt asked for."""
    own = PackedLayer.forward

    def forward(self: PackedLayer, input: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = _Product42.apply(input, self, previous)
        return product

    PackedLayer.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        PackedLayer.forward = own  # type: ignore[method-assign]


@contextlib.contextmanager
def statistics(row: dict[str, Any]) -> Iterator[None]:
    """Those of the row's quantisation: ``bnb.nf4-dq`` has the toolkit's two levels, ``bnb.nf4`` one."""
    two_levels = nf4.sized_nf4

    def one_level(weight: torch.Tensor, storage: torch.dtype, nested: bool = True) -> tuple[torch.Tensor, nf4.Sizes]:
        return two_levels(weight, storage, nested=False)

    nf4.sized_nf4 = two_levels if "dq" in str(row.get("quantization")) else one_level
    try:
        yield
    finally:
        nf4.sized_nf4 = two_levels


def predicted(row: dict[str, Any]) -> int:
    """Bytes that ``max_memory_allocated`` counts: cuBLAS' workspaces too, not the CUDA context."""
    with without("bitsandbytes"), statistics(row):
        resolved = resolve(Recipe.model_validate(recipe(row)), "row", device="cuda")
        return Planner.of(resolved, row["seq_len"], loop(row)).memory(resolved).peak + WORKSPACE
