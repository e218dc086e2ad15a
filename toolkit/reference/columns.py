"""Layers whose matrices several ranks divide, in the plain loop.

What the plain loop computes of such a layer is the layer, whole. In 16 bits the sum of two products of half the columns
rounds otherwise than one product of all, so it also has the candidate's order of operations: in turn, the product of
each part, and their sum. That this changes nothing else is shown in float32, where both orders are computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from toolkit.upstream.transformers import attention_of

FIRST = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1", "c_fc")
"""The matrices that make heads and inner units of hidden states, by their names in transformers' models."""
SECOND = ("o_proj", "down_proj", "dense", "fc2", "c_proj")
"""Those that make hidden states of them."""
OF_HEADS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")
"""Norms of each head by itself."""
OF_UNITS = ("act_fn", "act", "activation_fn")
"""Functions of each inner unit by itself, of which some have weights."""


NAME = "plain_columns"


@contextlib.contextmanager
def in_columns(model: nn.Module, count: int) -> Iterator[None]:
    """Inside, forwards of ``model`` compute every layer's matrices in ``count`` parts, one after another."""
    patched: list[nn.Module] = []

    def patch(module: nn.Module, forward: Callable[..., torch.Tensor]) -> None:
        module.forward = MethodType(forward, module)
        patched.append(module)

    if count == 1:
        yield
        return
    with _attending(model, count):
        for name, module in model.named_modules():
            own = name.rpartition(".")[2]
            if own in OF_HEADS:
                patch(module, _heads(module.forward, count))
            elif own in OF_UNITS and any(True for _ in module.parameters()):
                patch(module, _units(module.forward, count))
            elif own in (*FIRST, *SECOND):
                for linear in _linears(module, own in FIRST):
                    patch(linear, _outputs(count) if own in FIRST else _inputs(count))
        try:
            yield
        finally:
            for module in patched:
                del module.forward


@contextlib.contextmanager
def _attending(model: Any, count: int) -> Iterator[None]:
    """Inside, each part of the heads attends by itself: a product of other strides may round otherwise."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    def attention(module: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> tuple[torch.Tensor, None]:
        parts = zip(*(x.chunk(count, dim=1) for x in (q, k, v)), strict=True)
        found = [sdpa_attention_forward(module, *map(_alone, part), mask, **options)[0] for part in parts]
        return torch.cat(found, dim=2), None

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    own = attention_of(base.config) or "sdpa"
    if own != "sdpa":
        yield
        return
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    base.set_attn_implementation(NAME)
    try:
        yield
    finally:
        base.set_attn_implementation(own)


def _alone(x: torch.Tensor) -> torch.Tensor:
    """Some heads (batch, heads, length, width) in memory of their own, by tokens, as a layer makes them."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _linears(module: Any, first: bool) -> list[nn.Linear]:
    """A layer's own matrix, and of a low-rank adapter the one on the side that is divided."""
    if isinstance(module, nn.Linear):
        return [module]
    if not hasattr(module, "base_layer"):
        return []
    side = module.lora_B if first else module.lora_A
    return [module.base_layer, *side.values()]


def _outputs(count: int) -> Callable[..., torch.Tensor]:
    def forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        x = x.view_as(x)  # the parts of its gradient are summed here, before those of other matrices
        biases = [None] * count if self.bias is None else self.bias.chunk(count)
        parts = zip(self.weight.chunk(count), biases, strict=True)
        return torch.cat([functional.linear(x, weight, bias) for weight, bias in parts], dim=-1)

    return forward


def _inputs(count: int) -> Callable[..., torch.Tensor]:
    def forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        parts = zip(x.chunk(count, dim=-1), self.weight.chunk(count, dim=1), strict=True)
        total = sum(functional.linear(own.contiguous(), weight.contiguous()) for own, weight in parts)
        assert isinstance(total, torch.Tensor)
        return total if self.bias is None else total + self.bias.to(total.dtype)

    return forward


def _units(own: Callable[..., torch.Tensor], count: int) -> Callable[..., torch.Tensor]:
    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([own(part.contiguous()) for part in x.chunk(count, dim=-1)], dim=-1)

    return forward


def _heads(own: Callable[..., torch.Tensor], count: int) -> Callable[..., torch.Tensor]:
    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        # (batch, length, heads, width), or the heads before the length, which is a view of that.
        dim = -2 if x.is_contiguous() else -3
        return torch.cat([own(part.contiguous()) for part in x.chunk(count, dim=dim)], dim=dim)

    return forward
