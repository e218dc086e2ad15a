"""Shapes of the models that others measured, as their own config.json files publish them."""

from __future__ import annotations

from typing import Any


def _llama(hidden: int, inner: int, layers: int, heads: int, groups: int, words: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": groups, "vocab_size": words,
        "max_position_embeddings": 8192, "tie_word_embeddings": False,
    } | more  # fmt: skip


_MISTRAL = _llama(4096, 14336, 32, 32, 8, 32000, model_type="mistral", max_position_embeddings=32768)
MODELS: dict[str, dict[str, Any]] = {
    "mistralai/Mistral-7B-v0.1": _MISTRAL | {"sliding_window": 4096},
    "mistral-community/Mistral-7B-v0.2": _MISTRAL | {"sliding_window": None},
    "mistralai/Mixtral-8x7B-Instruct-v0.1": _MISTRAL
    | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    "NousResearch/Llama-2-70b-hf": _llama(8192, 28672, 80, 64, 8, 32000, max_position_embeddings=4096),
    "meta-llama/Llama-2-70b-hf": _llama(8192, 28672, 80, 64, 8, 32000, max_position_embeddings=4096),
    "meta-llama/Llama-2-7b-hf": _llama(4096, 11008, 32, 32, 32, 32000, max_position_embeddings=4096),
    "meta-llama/Meta-Llama-3-8B": _llama(4096, 14336, 32, 32, 8, 128256),
    "meta-llama/Llama-3.2-3B": _llama(3072, 8192, 28, 24, 8, 128256, head_dim=128, tie_word_embeddings=True),
    "ibm/PowerLM-3b": _llama(2304, 9216, 40, 36, 36, 49152, model_type="granite", tie_word_embeddings=True),
    "bigcode/gpt_bigcode-santacoder": {
        "model_type": "gpt_bigcode", "n_embd": 2048, "n_layer": 24, "n_head": 16, "n_inner": 8192,
        "vocab_size": 49280, "n_positions": 2048, "multi_query": True, "scale_attn_weights": True,
        "attention_softmax_in_fp32": True, "scale_attention_softmax_in_fp32": True, "tie_word_embeddings": True,
        "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1,
    },
}  # fmt: skip
