"""Older models of transformers on today's: what differs in memory, from their source."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional


@contextlib.contextmanager
def float_logits(model: nn.Module) -> Iterator[None]:
    """4.45, models' own ``forward``: ``logits = self.lm_head(hidden).float()``; those in 16 bits are gone at once."""
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    handle = head.register_forward_hook(lambda module, args, output: output.float())
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def repeated_heads(model: nn.Module) -> Iterator[None]:
    """4.45, ``MistralFlashAttention2`` and ``MixtralFlashAttention2``: key and value heads repeated for the queries."""
    from transformers.integrations.sdpa_attention import repeat_kv
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as KNOWN

    name = model.config._attn_implementation  # type: ignore[union-attr]
    own = KNOWN[name]

    def attended(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *a: Any, **k: Any) -> Any:
        times = query.shape[1] // key.shape[1]
        return own(module, query, repeat_kv(key, times), repeat_kv(value, times), *a, **k)

    KNOWN[name] = attended
    try:
        yield
    finally:
        KNOWN[name] = own


@contextlib.contextmanager
def kept_keys(model: nn.Module) -> Iterator[None]:
    """4.48, ``GPTBigCodeModel``: returns keys and values also under activation checkpointing. They are views of
    ``c_attn``'s outputs, which are whole in memory until the loss has been returned, one of each block."""
    kept: list[torch.Tensor] = []

    def keep(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if not torch.is_grad_enabled():  # of the forward; the recomputed ones are dropped
            kept.append(output)

    def returned(module: nn.Module, args: Any, output: Any) -> None:
        output.past_key_values = tuple(kept)
        kept.clear()

    base: Any = getattr(model, "get_base_model", lambda: model)()
    handles = [module.register_forward_hook(keep) for name, module in base.named_modules() if name.endswith(".c_attn")]
    handles.append(base.register_forward_hook(returned))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def own_dtype_loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **options: Any) -> torch.Tensor:
    """``GPTBigCodeForCausalLM`` up to 4.48 does not copy logits to float32; autocast's cross entropy does."""
    shifted = logits[..., :-1, :].contiguous()
    copied = shifted.float() if torch.is_autocast_enabled("cpu") else shifted
    return functional.cross_entropy(copied.view(-1, vocab_size), labels[..., 1:].contiguous().view(-1))


class LinearExperts(nn.Module):
    """4.48, ``MixtralSparseMoeBlock``: three linear layers an expert, which bitsandbytes quantises; every expert
    computes as many tokens."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.share = (config.num_experts_per_tok, config.num_local_experts)
        width, inner = config.hidden_size, config.intermediate_size
        sizes = ((width, inner), (inner, width), (width, inner))
        self.experts = nn.ModuleList(
            nn.ModuleList(nn.Linear(*size, bias=False) for size in sizes) for _ in range(config.num_local_experts)
        )

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        taken, of = self.share
        rows = hidden.shape[0] * taken // of
        total = torch.zeros_like(hidden)
        chosen = torch.zeros(rows, dtype=torch.int64)
        for expert in self.experts:
            layers: Any = expert
            one, two, three = layers
            part = hidden.index_select(0, chosen)
            output = two(functional.silu(one(part)) * three(part)) * weights.view(-1)[:rows, None]
            total.index_add_(0, chosen, output.to(hidden.dtype))
        return total


@contextlib.contextmanager
def linear_experts() -> Iterator[None]:
    """Mixtral with ``LinearExperts``; QLoRA is then resolved too."""
    from transformers.models.mixtral import modeling_mixtral

    from toolkit.recipe import quantisable

    own, check = modeling_mixtral.MixtralExperts, quantisable.kept_elsewhere
    modeling_mixtral.MixtralExperts = LinearExperts
    quantisable.kept_elsewhere = lambda facts: None
    try:
        yield
    finally:
        modeling_mixtral.MixtralExperts, quantisable.kept_elsewhere = own, check
