"""Llamas as torchtune and torchtitan compute them, from a transformers config: sizes for a plan, without weights.

Read from torchtune 0.6.1 (modules/attention.py, rms_norm.py, position_embeddings.py, feed_forward.py, transformer.py,
peft/lora.py) and torchtitan 0.3.0 (models/common/attention.py, rope.py, feed_forward.py, decoder.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from toolkit.errors import InputError

KNOWN = ("llama", "mistral")


class TuneNorm(nn.Module):
    """torchtune's ``RMSNorm``: of a float32 copy."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(hidden.float(), self.weight.shape, self.weight).to(hidden.dtype)


class TitanNorm(nn.Module):
    """``torch.nn.RMSNorm``, in the dtype of its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(hidden, self.weight.shape, self.weight)


def tune_rotated(states: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """``RotaryPositionalEmbeddings``: pairs of neighbours of a float32 copy. ``states`` (rows, length, heads, size)."""
    pairs = states.float().reshape(*states.shape[:-1], -1, 2)
    cos, sin = cache[..., 0], cache[..., 1]
    one, two = pairs[..., 0], pairs[..., 1]
    turned = torch.stack([one * cos - two * sin, two * cos + one * sin], -1)
    return turned.flatten(3).type_as(states)


def titan_rotated(states: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """``ComplexRoPE``: products of complex numbers in float32."""
    numbers = torch.view_as_complex(states.float().reshape(*states.shape[:-1], -1, 2))
    return torch.view_as_real(numbers * torch.view_as_complex(cache)).flatten(3).type_as(states)


class Attention(nn.Module):
    """``repeats``: keys and values are copied for all heads (torchtune); otherwise the kernel shares them."""

    def __init__(self, config: Any, repeats: bool) -> None:
        super().__init__()
        self.heads, self.repeats = config.num_attention_heads, repeats
        self.groups = config.num_key_value_heads or self.heads
        self.size = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        width = config.hidden_size
        self.q_proj: nn.Module = nn.Linear(width, self.heads * self.size, bias=False)
        self.k_proj: nn.Module = nn.Linear(width, self.groups * self.size, bias=False)
        self.v_proj: nn.Module = nn.Linear(width, self.groups * self.size, bias=False)
        self.o_proj: nn.Module = nn.Linear(self.heads * self.size, width, bias=False)

    def forward(self, hidden: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        rows, length, _ = hidden.shape
        turn = tune_rotated if self.repeats else titan_rotated
        query = turn(self.q_proj(hidden).view(rows, length, -1, self.size), cache).transpose(1, 2)
        key, value = self.k_proj(hidden), self.v_proj(hidden)
        key = turn(key.view(rows, length, -1, self.size), cache).transpose(1, 2)
        value = value.view(rows, length, -1, self.size).transpose(1, 2)
        if self.repeats and self.heads != self.groups:
            shape = (rows, self.groups, self.heads // self.groups, -1, self.size)
            key, value = (x.unsqueeze(2).expand(shape).flatten(1, 2) for x in (key, value))
        output = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=self.heads != key.shape[1]
        )
        return self.o_proj(output.transpose(1, 2).contiguous().view(rows, length, -1))


class Mlp(nn.Module):
    """``FeedForward``."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj: nn.Module = nn.Linear(width, inner, bias=False)
        self.down_proj: nn.Module = nn.Linear(inner, width, bias=False)
        self.up_proj: nn.Module = nn.Linear(width, inner, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gated = functional.silu(self.gate_proj(hidden))
        gated = gated * self.up_proj(hidden)
        return self.down_proj(gated)


class DecoderBlock(nn.Module):
    """``TransformerSelfAttentionLayer`` or ``TransformerBlock``."""

    def __init__(self, config: Any, tune: bool) -> None:
        super().__init__()
        norm = TuneNorm if tune else TitanNorm
        self.first, self.second = norm(config.hidden_size), norm(config.hidden_size)
        self.attention, self.mlp = Attention(config, tune), Mlp(config)

    def forward(self, hidden: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        hidden = self.attention(self.first(hidden), cache) + hidden
        return hidden + self.mlp(self.second(hidden))


class Decoder(nn.Module):
    """``TransformerDecoder`` (``tune``) or torchtitan's ``Decoder``; its head is called by the loss. ``config``:
    transformers', of the same model. Raises InputError for models that would have to be read first."""

    def __init__(self, config: Any, tune: bool) -> None:
        super().__init__()
        name = "torchtune" if tune else "torchtitan"
        if config.model_type not in KNOWN:
            known = ", ".join(KNOWN)
            kind = config.model_type
            raise InputError(f"--loop {name}: plan does not know {name}'s model of type {kind}; it does: {known}")
        self.config = config
        width, words = config.hidden_size, config.vocab_size
        self.tok_embeddings = nn.Embedding(words, width)
        self.layers = nn.ModuleList(DecoderBlock(config, tune) for _ in range(config.num_hidden_layers))
        self.norm = TuneNorm(width) if tune else TitanNorm(width)
        self.output: nn.Module = nn.Linear(width, words, bias=False)
        if config.tie_word_embeddings:
            self.output.weight = self.tok_embeddings.weight
        self.size: int = self.layers[0].attention.size  # type: ignore[assignment]

    def get_input_embeddings(self) -> nn.Module:
        return self.tok_embeddings

    def get_output_embeddings(self) -> nn.Module:
        return self.output

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The last hidden states."""
        cache = torch.ones((1, input_ids.shape[1], 1, self.size // 2, 2), dtype=torch.float32)
        hidden = self.tok_embeddings(input_ids)
        for block in self.layers:
            hidden = block(hidden, cache)
        normed: torch.Tensor = self.norm(hidden)
        return normed
