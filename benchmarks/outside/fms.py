"""Rows of foundation-model-stack/fms-acceleration: transformers' Trainer through fms-hf-tuning on A100s.

Read at commit 876e2ed6fc4e (scripts/benchmarks/refs/a100_80gb.csv, scenarios.yaml, accelerate.yaml), with the source of
transformers 4.45.2 and 4.48.1, PEFT 0.13.2, accelerate 1.0.1, bitsandbytes 0.43.3 and fms_acceleration_foak 0.7.4.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from benchmarks.outside import kernels, older
from benchmarks.outside.models import MODELS
from toolkit.planning.allocator import Parts, workspaces
from toolkit.planning.loops import LOOPS, Loop, LoopPrecision
from toolkit.planning.loops.rules import adapters_in_float32
from toolkit.planning.loops.trainer import linear4bit, with_loss
from toolkit.planning.predict import Planner
from toolkit.planning.unneeded import without
from toolkit.recipe.resolve import Precision, Resolved
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve

SOURCE = "foundation-model-stack/fms-acceleration"
KIND = "peak_allocated_gib"
WORKSPACE = workspaces("a100-80gb")
"""... of a device before Hopper."""
BIGCODE = "bigcode/gpt_bigcode-santacoder"


def why_left_out(row: dict[str, Any]) -> str:
    """Why a row is not predicted; empty if it is."""
    if row["model"] not in MODELS:
        return "GPTQ: no memory model of its kernels" if "GPTQ" in row["model"] else "a model without a config here"
    if "seq_len" not in row:
        return "rows of unknown lengths"
    if "GPTQ" in str(row.get("quantization")):
        return "GPTQ: no memory model of its kernels"
    return ""


def why_not_timed(row: dict[str, Any]) -> str:
    """Why no time is predicted for a row; empty if it is."""
    return why_left_out(row)


def recipe(row: dict[str, Any]) -> dict[str, Any]:
    """The recipe that says what the row says. Under FSDP, bf16 means float32 weights that train; on one GPU all that
    trains but an adapter is in bfloat16 (``torch_dtype: bfloat16``)."""
    adapter = None
    if row["task"] in ("lora", "qlora"):
        found = row["adapter"]
        targets = ["c_attn"] if row["model"] == BIGCODE else found["target_modules"]
        adapter = {"method": row["task"], "r": found["r"], "alpha": float(found["lora_alpha"]),
                   "dropout": found["lora_dropout"], "target_modules": targets}  # fmt: skip
    mixed = row["precision"]["autocast"] and (adapter is not None or row["world"] > 1)
    return {
        "model": {"config": MODELS[row["model"]], "attention": "flash_attention_2"},
        "tokenizer": {"path": "none"},
        "data": {"train": "none", "max_length": row["seq_len"]},
        "batch": {"micro_size": row["micro_batch"], "accumulation": 1},
        "adapter": adapter,
        "precision": "bf16" if mixed else "bf16-pure",
        "optimizer": {"kernel": "foreach", "decay": "all"},  # the Trainer decays embeddings
        "activation_checkpointing": "full",
        "strategy": {"name": "single" if row["world"] == 1 else "fsdp1"},
        "machine": {"device": "cuda", "processes": row["world"]},
        "run": {"max_steps": 2},
    }


def loop(row: dict[str, Any]) -> Loop:
    """The Trainer as the row ran it: version, kernels, and what is in float32."""
    family = row["kernel_family"]
    quantised, liger = row["task"] == "qlora", "liger" in family
    old = "transformers 4.48" not in row["notes"] and row["model"] != BIGCODE
    entered: list[Callable[[nn.Module], contextlib.AbstractContextManager[None]]] = []
    if old and not liger:
        entered.append(older.float_logits)
    if old and "mistral" in row["model"].lower() and family != "hf":
        entered.append(older.repeated_heads)
    if row["model"] == BIGCODE:
        entered.append(older.kept_keys)
    fast = functools.partial(kernels.fast_kernels, fused_lora=quantised)
    entered.append(linear4bit if family == "hf" else fast)
    base = LOOPS["trainer-4.48"]
    loss = base.loss
    if liger:
        loss = _liger
    elif row["model"] == BIGCODE:
        loss = with_loss(older.own_dtype_loss if family == "hf" else _fast_own)
    elif family != "hf":
        loss = with_loss(kernels.fast_loss)
    return replace(base, loss=loss, acting=functools.partial(entering, entered), precision=_dtypes(row))


@contextlib.contextmanager
def entering(entered: list[Any], model: nn.Module) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for acting in entered:
            stack.enter_context(acting(model))
        yield


def norms_alone(row: dict[str, Any]) -> bool:
    """Whether norms are in float32: trl's peft_module_casting_to_bf16 takes embeddings and head back to 16 bits."""
    return "norms/embeddings/head in fp32" in row["notes"]


def _dtypes(row: dict[str, Any]) -> Callable[[Resolved], Precision]:
    def precision(resolved: Resolved) -> Precision:
        own = adapters_in_float32(resolved)
        if not row["precision"]["autocast"]:
            return own
        norms = "float32" if norms_alone(row) else ""
        return LoopPrecision(own.compute, own.trainable, own.frozen, autocast=True, packed="bfloat16", norms=norms)

    return precision


def _fast_own(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **options: Any) -> torch.Tensor:
    losses: torch.Tensor = kernels.FastLoss.apply(logits[..., :-1, :].contiguous().view(-1, vocab_size))
    return torch.sum(losses)


def _liger(model: nn.Module, config: Any, tensors: Any, task: str, terms: Any) -> torch.Tensor:
    """``lce_forward``: no logits at all."""
    base: Any = getattr(model, "get_base_model", lambda: model)()
    head = base.get_output_embeddings()
    found: list[torch.Tensor] = []

    def acted(hidden: torch.Tensor) -> torch.Tensor:
        found.append(kernels.LigerLoss.apply(hidden.reshape(-1, hidden.shape[-1]), head.weight))
        return hidden[..., :1]

    head.forward = acted
    base.loss_function = lambda *args, **options: found.pop()
    try:
        loss: torch.Tensor = model(**tensors).loss
        return loss
    finally:
        del base._loss_function, head.__dict__["forward"]


@contextlib.contextmanager
def planned(row: dict[str, Any]) -> Iterator[tuple[Planner, Resolved]]:
    """The row's planner and recipe, inside the context that its traces need."""
    experts = older.linear_experts() if "Mixtral" in row["model"] else contextlib.nullcontext()
    with experts, without("bitsandbytes"):
        resolved = resolve(Recipe.model_validate(recipe(row)), "row", device="cuda")
        yield Planner.of(resolved, row["seq_len"], loop(row)), resolved


def predicted(row: dict[str, Any]) -> int:
    """Bytes at the peak of the step as `max_memory_allocated` counts them: with cuBLAS' workspaces, without the CUDA
    context."""
    return int(parts(row).peak)


def parts(row: dict[str, Any]) -> Parts:
    """The same, with what a process takes more for."""
    with planned(row) as (planner, resolved):
        return Parts.of(planner.memory(resolved), "a100-80gb", row["world"], sharded=row["world"] > 1)
