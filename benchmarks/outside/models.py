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
    "01-ai/Yi-34B": _llama(7168, 20480, 60, 56, 8, 64000, max_position_embeddings=4096),
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


def _neox(hidden: int, layers: int, words: int) -> dict[str, Any]:
    return {
        "model_type": "gpt_neox", "hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": 32, "vocab_size": words, "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    }  # fmt: skip


def _phi(hidden: int, layers: int, share: float) -> dict[str, Any]:
    return {
        "model_type": "phi", "hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": 32, "vocab_size": 51200, "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": share},
    }  # fmt: skip


def _gemma(kind: str, hidden: int, inner: int, layers: int, heads: int, groups: int) -> dict[str, Any]:
    return _llama(hidden, inner, layers, heads, groups, 256000, model_type=kind, head_dim=256)


LITGPT: dict[str, dict[str, Any]] = MODELS | {
    "phi-1.5": _phi(2048, 24, 0.5),
    "microsoft/phi-2": _phi(2560, 32, 0.4),
    "microsoft/Phi-3-mini-4k-instruct": _llama(
        3072, 8192, 32, 32, 32, 32064, model_type="phi3", sliding_window=2047, pad_token_id=0
    ),
    "stablelm-base-alpha-3b": _neox(4096, 16, 50688),
    "stabilityai/stablelm-base-alpha-3b": _neox(4096, 16, 50688),
    "Llama-2-7b": MODELS["meta-llama/Llama-2-7b-hf"],
    "Llama-2-13b": _llama(5120, 13824, 40, 40, 40, 32000),
    "meta-llama/Meta-Llama-3.1-8B": MODELS["meta-llama/Meta-Llama-3-8B"],
    "meta-llama/Llama-3.2-1B": _llama(2048, 8192, 16, 32, 8, 128256),
    "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T": _llama(2048, 5632, 22, 32, 4, 32000),
    "unsloth/Mistral-7B-v0.2": MODELS["mistral-community/Mistral-7B-v0.2"],
    "google/gemma-2b": _gemma("gemma", 2048, 16384, 18, 8, 1),
    "google/gemma-7b": _gemma("gemma", 3072, 24576, 28, 16, 16),
    "google/gemma-2-2b": _gemma("gemma2", 2304, 9216, 26, 8, 4),
    "google/gemma-2-9b": _gemma("gemma2", 3584, 14336, 42, 16, 8),
    "tiiuae/falcon-7b": {
        "model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
        "ffn_hidden_size": 18176, "vocab_size": 65024, "multi_query": True, "new_decoder_architecture": False,
        "parallel_attn": True, "bias": False, "alibi": False, "max_position_embeddings": 2048,
    },
}  # fmt: skip
"""... of litgpt's rows; vocabularies are padded as its ``Config`` pads them."""
