"""litgpt's fine-tuning: a head in chunks of 128 positions, on its own models.

Read from litgpt 0.5.12: finetune/lora.py and finetune/full.py (``main``, ``fit``), utils.py (``chunked_cross_entropy``,
``instantiate_bnb_optimizer``), and lightning 2.1 to 2.5, fabric/plugins/precision/half.py: ``convert_output`` copies
what the model returns, all chunks of logits, to float32. PyTorch's AdamW has no ``fused`` there, so that it runs
foreach kernels. FSDP1 wraps and recomputes every block; one GPU recomputes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.outside.loops.litgpt_model import LitGpt, Lora, LoraQkv, Style
from toolkit.errors import InputError
from toolkit.model.loss_terms import LossTerms
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Adapter

CHUNK = 128
"""``lm_head_chunk_size``, and the rows of a chunk of the cross entropy."""
_PARTS = {
    "q": ("q_proj", "query_key_value", "qkv_proj", "c_attn", "query"),
    "k": ("k_proj", "query_key_value", "qkv_proj", "c_attn", "key"),
    "v": ("v_proj", "query_key_value", "qkv_proj", "c_attn", "value"),
    "projection": ("o_proj", "dense", "out_proj", "projection"),
    "mlp": ("gate_proj", "up_proj", "down_proj", "gate_up_proj", "fc1", "fc2", "dense_h_to_4h", "dense_4h_to_h", "mlp"),
    "head": ("lm_head", "embed_out", "head"),
}
"""litgpt's switches (``lora_query`` …) by the names that a recipe has for the layers."""


def chunked_loss(
    model: nn.Module,
    config: Any,
    tensors: Mapping[str, torch.Tensor],
    task: str,
    terms: LossTerms,
    first: bool = False,
) -> torch.Tensor:
    """``fit``'s. Its ``logits`` are those of the micro-batch before until the next forward has returned; ``first``:
    there was none."""
    own: Any = model
    ids, targets = tensors["input_ids"], tensors["labels"][:, 1:]
    before = None if first else torch.empty(*ids.shape, own.sizes.words, dtype=torch.float32)
    hidden = model(ids)
    made = [own.lm_head(part) for part in (hidden.split(CHUNK, dim=1) if own.adapted else [hidden])]
    del hidden
    logits = [one.float() for one in made]
    del made, before
    if own.adapted:
        logits[-1] = logits[-1][..., :-1, :]
        chunks = [one.reshape(-1, one.shape[-1]) for one in logits]
        wanted = [one.reshape(-1) for one in targets.split(CHUNK, dim=1)]
    else:
        chunks = list(logits[0][..., :-1, :].reshape(-1, logits[0].shape[-1]).split(CHUNK))
        wanted = list(targets.reshape(-1).split(CHUNK))
    losses = [functional.cross_entropy(*pair, reduction="none") for pair in zip(chunks, wanted, strict=True)]
    loss: Any = torch.cat(losses).sum() / targets.numel()
    loss.logits = logits
    kept: torch.Tensor = loss
    return kept


def chosen_parts(adapter: Adapter) -> frozenset[str]:
    """Which of litgpt's switches are on: q, k, v, projection, mlp, head. Raises InputError for a layer without one."""
    targets = adapter.target_modules
    if targets is None or targets == "all-linear":
        return frozenset(_PARTS) - {"head"}
    named = [targets] if isinstance(targets, str) else targets
    for name in named:
        if not any(name in layers for layers in _PARTS.values()):
            raise InputError(f"--loop litgpt: adapter.target_modules: {name}: litgpt has no switch for it")
    return frozenset(part for part, layers in _PARTS.items() if set(layers) & set(named))


NOW = Style()


def build_model(resolved: Resolved, style: Style = NOW) -> nn.Module:
    """The recipe's model as litgpt builds it, on the meta device, with its adapters. Raises InputError."""
    from toolkit.model.load import build_config

    with torch.device("meta"):
        model = LitGpt(build_config(resolved), style)
        adapter = resolved.recipe.adapter
        if adapter is not None:
            _adapt(model, adapter, style)
    return model


def _adapt(model: LitGpt, adapter: Adapter, style: Style) -> None:
    model.adapted = True
    parts, rank = chosen_parts(adapter), adapter.r or 0
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    drop = adapter.dropout or 0.0
    if "head" in parts:
        model.lm_head = Lora(_linear(model.lm_head), rank, drop)
    sizes = model.sizes
    groups = sizes.groups * sizes.size
    for block in model.h:
        one: Any = block
        wanted = [part in parts for part in "qkv"]
        if any(wanted):
            shapes = (sizes.heads * sizes.size, groups, groups)
            one.attn.attn = LoraQkv(_linear(one.attn.attn), rank, drop, shapes, wanted, style)
        if "projection" in parts:
            one.attn.proj = Lora(_linear(one.attn.proj), rank, drop)
        for name in ("fc", "fc_1", "fc_2", "proj"):
            if "mlp" in parts and hasattr(one.mlp, name):
                setattr(one.mlp, name, Lora(_linear(getattr(one.mlp, name)), rank, drop))


def _linear(module: nn.Module) -> nn.Linear:
    assert isinstance(module, nn.Linear)
    return module
