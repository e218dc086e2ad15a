"""What the peers train: model, rows and precision, the same for all of them."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

VOCABULARY = 2048
SMALL: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 512,
    "tie_word_embeddings": False, "pad_token_id": 0,
}  # fmt: skip
LLAMA: dict[str, Any] = {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 8192,
                         "pad_token_id": 0}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """``rows`` samples an optimizer step in padded batches, ``packed_rows`` of ``longest`` tokens in packed ones.

    Lengths are log-normal with ``median`` and a sigma of 0.6; without a median every row is full.
    """

    described: str
    model: dict[str, Any] = field(default_factory=lambda: SMALL)
    device: str = "cpu"
    bf16: bool = False
    """Autocast over a base in 16 bits, adapters in float32; else everything is in float32."""
    checkpointing: bool = False
    longest: int = 512
    rows: int = 8
    packed_rows: int = 2
    """About as many tokens as ``rows`` samples have with their padding."""
    median: int | None = 70
    lora: int = 8

    @property
    def vocabulary(self) -> int:
        return int(self.model["vocab_size"])


def _of_1b(described: str, **changed: Any) -> Shape:
    """meta-llama/Llama-3.2-1B, as its config.json has it."""
    model = LLAMA | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
                     "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True}  # fmt: skip
    return Shape(described, model, device="cuda", bf16=True, lora=16, **changed)


SHAPES: dict[str, Shape] = {
    "cpu": Shape("Small Llama, LoRA on all linear layers, fp32, log-normal lengths (median 70, sigma 0.6)"),
    "small": Shape("Small Llama, LoRA, bf16, ragged rows (median 70, sigma 0.6)", device="cuda", bf16=True, rows=32,
                   packed_rows=8),
    "1b": _of_1b("Llama-3.2-1B, LoRA, bf16, ragged rows (median 70, sigma 0.6)", rows=32, packed_rows=8),
    "1b-full-rows": _of_1b("Llama-3.2-1B, LoRA, bf16, 4 rows of 2048 tokens", longest=2048, rows=4, packed_rows=4,
                           median=None),
    "8b-full-rows": Shape(
        "Llama-3-8B, LoRA, bf16, 2 rows of 4096 tokens, checkpointing",
        LLAMA | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
                 "num_key_value_heads": 8, "tie_word_embeddings": False},
        "cuda", bf16=True, checkpointing=True, longest=4096, rows=2, packed_rows=2, median=None, lora=16,
    ),
}  # fmt: skip


def tiny(shape: Shape) -> Shape:
    """The same on a CPU, in seconds: to try it out."""
    changed = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
               "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 512}  # fmt: skip
    model = {key: value for key, value in shape.model.items() if key != "head_dim"} | changed
    median = None if shape.median is None else 12
    return Shape(f"{shape.described}; tiny", model, "cpu", shape.bf16, shape.checkpointing, 32, 2, 2, median, 2)


def samples(shape: Shape, count: int, seed: int = 0) -> list[list[int]]:
    """Token ids, as long as the shape says."""
    draw = random.Random(seed)
    lengths = [_length(shape, draw) for _ in range(count)]
    return [draw.choices(range(3, shape.vocabulary), k=length) for length in lengths]


def _length(shape: Shape, draw: random.Random) -> int:
    if shape.median is None:
        return shape.longest
    # The logarithm of 70 as measurements so far were made with it.
    middle = 4.2485 if shape.median == 70 else math.log(shape.median)
    return min(shape.longest, max(4, round(draw.lognormvariate(middle, 0.6))))
