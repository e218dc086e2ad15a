"""The floating-point operations of a step's samples, and the peak rate of a device."""

from __future__ import annotations

import math
from typing import Any

from toolkit.benchmark.rows import Rows
from toolkit.planning.hardware import devices
from toolkit.recipe.resolve import Resolved
from toolkit.training.session import Session


def model_flops(session: Session, resolved: Resolved, rows: Rows) -> float | None:
    """Floating point operations that a step's tokens need, without padding and without recomputation.

    Two for each weight and token forward (the input embedding is looked up, not multiplied), as many for the gradient
    of what goes in, and as many for the gradient of each weight that trains (Kaplan et al., arXiv:2001.08361, section
    2.1). Attention: four for each pair of tokens and channel, and twice that backward; only pairs that may attend.
    None if the weights that a token meets are not all (mixtures of experts) or a config does not say.
    """
    config: Any = session.engine.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if any(getattr(text, key, None) for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        return None
    width, layers = getattr(text, "hidden_size", None), getattr(text, "num_hidden_layers", None)
    heads = getattr(text, "num_attention_heads", None)
    if width is None or layers is None or heads is None or getattr(config, "is_encoder_decoder", False):
        return None
    embedding = 0 if getattr(text, "tie_word_embeddings", False) else text.vocab_size * width
    weights = session.weights - embedding
    trained = sum(math.prod(shape) for shape in session.engine.shapes.values())
    channels = heads * (getattr(text, "head_dim", None) or width // heads)
    return rows.tokens * (4.0 * weights + 2.0 * min(trained, weights)) + 3 * 4.0 * rows.pairs * channels * layers


def device_rate(name: str) -> float | None:
    """Floating point operations per second of a GPU by its data sheet (dense, bf16; fp16 where it has no bf16), or
    None if it is not known."""
    words = name.lower().replace("nvidia", "").replace("geforce", "").replace("-", " ").split()
    joined = "".join(words)
    matches = [key for key in devices() if all(part in joined for part in key.split("-"))]
    if not matches:
        return None
    device = devices()[max(matches, key=len)]
    return (device.bf16 or device.rate("float16")) * 1e12
