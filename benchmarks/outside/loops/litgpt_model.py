"""litgpt's models as they compute, from a transformers config: sizes for a plan, without weights.

Read from litgpt 0.5.12 (model.py, lora.py, config.py); ``style`` tells apart what earlier versions do otherwise. Query,
key and value come from one layer; keys and values are repeated for all heads; head and embeddings are two weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from toolkit.errors import InputError


@dataclass(frozen=True)
class Sizes:
    """A model of litgpt's ``Config``. ``rotary``: elements of a head that are turned. ``sides``: whether attention and
    MLP read the same input; ``shared``: through the same norm. ``rms``, ``gated``: kinds of norms and MLP. ``after``: a
    norm behind each too. ``capped``: scores go through a tanh, without a kernel. ``window``: layers out of two (1: all)
    with a mask of their own; 0: none."""

    width: int
    inner: int
    layers: int
    heads: int
    groups: int
    size: int
    words: int
    rotary: int
    rms: bool = True
    gated: bool = True
    sides: bool = False
    shared: bool = False
    after: bool = False
    capped: bool = False
    window: int = 0
    bias: bool = False
    head_bias: bool = False


@dataclass(frozen=True)
class Style:
    """What versions do otherwise. ``float_weight``: whether a norm multiplies by its weight in float32, or in the
    model's dtype (0.3). ``padded_in_place``: whether the adapters' q, k and v are written into zeros, or into a copy of
    these."""

    float_weight: bool = True
    padded_in_place: bool = True


KNOWN = ("llama", "mistral", "gemma", "gemma2", "phi", "phi3", "falcon", "gpt_neox")


def sizes_of(config: Any) -> Sizes:
    """Raises InputError for a model that litgpt's own would have to be read for first."""
    kind = config.model_type
    if kind not in KNOWN:
        raise InputError(
            f"--loop litgpt: plan does not know litgpt's model of type {kind}; it does: {', '.join(KNOWN)}"
        )
    heads = config.num_attention_heads
    width = config.hidden_size
    size = getattr(config, "head_dim", None) or width // heads
    share = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)
    plain = {
        "width": width, "layers": config.num_hidden_layers, "heads": heads, "size": size, "words": config.vocab_size,
        "groups": getattr(config, "num_key_value_heads", None) or heads, "rotary": int(share * size),
        "inner": getattr(config, "intermediate_size", None) or 4 * width,
    }  # fmt: skip
    if kind == "phi":
        two = {"rms": False, "gated": False, "sides": True, "shared": True, "bias": True, "head_bias": True}
        return Sizes(**plain | two)
    if kind == "gpt_neox":
        return Sizes(**plain, rms=False, gated=False, sides=config.use_parallel_residual, bias=True)
    if kind == "falcon":
        groups = 1 if config.multi_query and not config.new_decoder_architecture else config.num_kv_heads
        shared = not config.new_decoder_architecture
        made = plain | {"groups": groups, "inner": config.ffn_hidden_size}
        return Sizes(**made, rms=False, gated=False, sides=True, shared=shared)
    if kind == "gemma2":
        return Sizes(**plain, after=True, capped=True, window=2)
    window = 1 if kind == "phi3" and config.sliding_window else 0
    return Sizes(**plain, window=window)


class Norm(nn.Module):
    """``RMSNorm``."""

    def __init__(self, width: int, float_weight: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.float_weight = float_weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        given = hidden.dtype
        hidden = hidden.float()
        mean = torch.mean(hidden * hidden, dim=-1, keepdim=True)
        scaled = hidden * torch.rsqrt(mean + 1e-5)
        if self.float_weight:
            return (scaled * self.weight.float()).to(given)
        return scaled.to(given) * self.weight


class Lora(nn.Module):
    """``LoRALinear``: a layer, and a product of two matrices of its input behind dropout."""

    def __init__(self, linear: nn.Linear, rank: int, dropout: float) -> None:
        super().__init__()
        self.linear = linear
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.lora_A = nn.Parameter(torch.empty(rank, linear.in_features))
        self.lora_B = nn.Parameter(torch.empty(linear.out_features, rank))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        base = self.linear(hidden)
        added = (self.dropout(hidden) @ self.lora_A.transpose(0, 1) @ self.lora_B.transpose(0, 1)) * 2.0
        return base + added


class LoraQkv(nn.Module):
    """``LoRAQKVLinear``: pairs of matrices for those of query, key and value that are ``chosen``, the others zeros."""

    def __init__(
        self, linear: nn.Linear, rank: int, dropout: float, parts: Sequence[int], chosen: Sequence[bool], style: Style
    ) -> None:
        super().__init__()
        self.linear, self.chosen, self.in_place = linear, tuple(chosen), style.padded_in_place
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.parts = [part for part, wanted in zip(parts, chosen, strict=True) if wanted]
        self.alike = len(set(parts)) == 1
        self.lora_A = nn.Parameter(torch.empty(rank * len(self.parts), linear.in_features))
        self.lora_B = nn.Parameter(torch.empty(sum(self.parts), rank))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        base = self.linear(hidden)
        low = functional.linear(self.dropout(hidden), self.lora_A).transpose(-2, -1)
        kernel = self.lora_B.unsqueeze(-1)
        if self.alike:
            high = functional.conv1d(low, kernel, groups=len(self.parts))
        else:
            pieces = zip(low.chunk(len(self.parts), dim=1), kernel.split(self.parts), strict=True)
            high = torch.cat([functional.conv1d(one, other) for one, other in pieces], dim=1)
        return base + self._padded(high.transpose(-2, -1)) * 2.0

    def _padded(self, high: torch.Tensor) -> torch.Tensor:
        if all(self.chosen):
            return high
        zeros = high.new_zeros(*high.shape[:-1], self.linear.out_features)
        index = torch.zeros(sum(self.parts), dtype=torch.int64)
        if self.in_place:
            return zeros.index_copy_(-1, index, high)
        return zeros.index_copy(-1, index, high.contiguous())


def rotated(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``apply_rope``: tables in float32 take the products there."""
    half = states.shape[-1] // 2
    turned = torch.cat((-states[..., half:], states[..., :half]), dim=-1)
    return (states * cos + turned * sin).to(states.dtype)


class Attention(nn.Module):
    """``CausalSelfAttention``."""

    def __init__(self, sizes: Sizes, masked: bool) -> None:
        super().__init__()
        self.sizes, self.masked = sizes, masked
        self.attn: nn.Module = nn.Linear(sizes.width, (sizes.heads + 2 * sizes.groups) * sizes.size, bias=sizes.bias)
        self.proj: nn.Module = nn.Linear(sizes.heads * sizes.size, sizes.width, bias=sizes.bias)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        sizes, (rows, length, _) = self.sizes, hidden.shape
        each = sizes.heads // sizes.groups
        states = self.attn(hidden).view(rows, length, sizes.groups, each + 2, sizes.size).permute(0, 2, 3, 1, 4)
        query, key, value = states.split((each, 1, 1), dim=2)
        if sizes.groups != sizes.heads:
            shape = (rows, sizes.groups, each, length, sizes.size)
            key, value = key.expand(shape), value.expand(shape)
        query, key, value = (x.reshape(rows, -1, length, sizes.size) for x in (query, key, value))
        query, key = (
            torch.cat((rotated(x[..., : sizes.rotary], cos, sin), x[..., sizes.rotary :]), dim=-1) for x in (query, key)
        )
        mask = self._mask(query) if self.masked else None
        output = self._capped(query, key, value, mask) if sizes.capped else self._kernel(query, key, value, mask)
        return self.proj(output.transpose(1, 2).reshape(rows, length, -1))

    def _kernel(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any) -> torch.Tensor:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)

    def _capped(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any) -> torch.Tensor:
        scores = query @ key.mT * (1 / math.sqrt(self.sizes.size))
        scores = torch.tanh(scores / 50.0) * 50.0
        scores = scores + (self._mask(query) if mask is None else mask)
        return functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype) @ value

    def _mask(self, query: torch.Tensor) -> torch.Tensor:
        return torch.ones(query.shape[2], query.shape[2], dtype=query.dtype).triu(diagonal=1)


class Mlp(nn.Module):
    """``LLaMAMLP``, ``GemmaMLP`` or, not ``gated``, ``GptNeoxMLP``."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gated = sizes.gated
        names = ("fc_1", "fc_2") if sizes.gated else ("fc",)
        for name in names:
            setattr(self, name, nn.Linear(sizes.width, sizes.inner, bias=sizes.bias))
        self.proj: nn.Module = nn.Linear(sizes.inner, sizes.width, bias=sizes.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        own: Any = self
        if not self.gated:
            return self.proj(functional.gelu(own.fc(hidden)))
        one, two = own.fc_1(hidden), own.fc_2(hidden)
        return self.proj(functional.silu(one) * two)


class LitBlock(nn.Module):
    """``Block``."""

    def __init__(self, sizes: Sizes, style: Style, masked: bool) -> None:
        super().__init__()
        self.sizes = sizes
        self.norm_1 = _norm(sizes, style)
        self.attn = Attention(sizes, masked)
        self.post_attention_norm = _norm(sizes, style) if sizes.after else nn.Identity()
        self.norm_2 = None if sizes.shared else _norm(sizes, style)
        self.mlp = Mlp(sizes)
        self.post_mlp_norm = _norm(sizes, style) if sizes.after else nn.Identity()
        self.sliding_window = masked  # its kind (toolkit/planning/kinds.py)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        normed = self.norm_1(hidden)
        attended = self.post_attention_norm(self.attn(normed, cos, sin))
        if self.sizes.sides:
            read = normed if self.norm_2 is None else self.norm_2(hidden)
            return self.mlp(read) + attended + hidden
        hidden = attended + hidden
        assert self.norm_2 is not None
        return self.post_mlp_norm(self.mlp(self.norm_2(hidden))) + hidden


def _norm(sizes: Sizes, style: Style) -> nn.Module:
    return Norm(sizes.width, style.float_weight) if sizes.rms else nn.LayerNorm(sizes.width)


class LitGpt(nn.Module):
    """``GPT``; its head is called by the loss. ``config``: transformers', of the same model."""

    def __init__(self, config: Any, style: Style) -> None:
        super().__init__()
        sizes = sizes_of(config)
        self.config, self.sizes, self.adapted = config, sizes, False
        self.lm_head: nn.Module = nn.Linear(sizes.width, sizes.words, bias=sizes.head_bias)
        self.wte = nn.Embedding(sizes.words, sizes.width)
        windows = [bool(sizes.window) and at % sizes.window == 0 for at in range(sizes.layers)]
        self.h = nn.ModuleList(LitBlock(sizes, style, masked) for masked in windows)
        self.ln_f = _norm(sizes, style)

    def get_input_embeddings(self) -> nn.Module:
        return self.wte

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The last hidden states."""
        shape = (input_ids.shape[1], self.sizes.rotary)
        cos, sin = torch.ones(shape, dtype=torch.float32), torch.ones(shape, dtype=torch.float32)
        hidden = self.wte(input_ids)
        for block in self.h:
            hidden = block(hidden, cos, sin)
        normed: torch.Tensor = self.ln_f(hidden)
        return normed
