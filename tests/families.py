"""Tiny models of many families, by their transformers config."""

from __future__ import annotations

from typing import Any

_NARROW = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_GROUPED = _NARROW | {"num_key_value_heads": 2, "vocab_size": 300}
# Tests compare gradients; where a family has dropout by default it is left on unless it draws per process.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"config": {"model_type": "llama", **_GROUPED}},
    "qwen3": {"config": {"model_type": "qwen3", **_GROUPED, "head_dim": 8, "tie_word_embeddings": True}},
    "gemma": {"config": {"model_type": "gemma", **_GROUPED, "head_dim": 8}},
    "gpt2": {"config": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 300}},
    "gpt_neox": {"config": {"model_type": "gpt_neox", **_NARROW, "vocab_size": 300}},
    "mixtral": {"config": {"model_type": "mixtral", **_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}},
    "t5": {
        "task": "seq2seq-lm",
        "config": {
            "model_type": "t5",
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": 300,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
        },
    },
    "bert": {
        "task": "sequence-classification",
        "num_labels": 3,
        "config": {"model_type": "bert", **_NARROW, "vocab_size": 300, "max_position_embeddings": 64},
    },
}
