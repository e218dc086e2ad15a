"""Shapes of widely used models, as their own config.json files on the hub publish them: for a plan where the hub cannot
be reached, or does not give the file to this login. Nothing trains from them. Imports no torch."""

from __future__ import annotations

from typing import Any


def shape_of(repo: str) -> dict[str, Any] | None:
    """The config of the hub model ``repo``, its sizes only; None where it is not in the table."""
    found = _SHAPES.get(repo) or _SHAPES.get(repo.removesuffix("-Instruct"))
    return None if found is None else dict(found)


def _shape(
    kind: str, hidden: int, inner: int, layers: int, heads: int, groups: int, words: int, rows: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": kind, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": groups, "vocab_size": words,
        "max_position_embeddings": rows, "tie_word_embeddings": False,
    } | more  # fmt: skip


_TIED = {"tie_word_embeddings": True}
_QWEN3 = {"head_dim": 128}
_LLAMA_8B = (4096, 14336, 32, 32, 8, 128256)
_LLAMA_70B = (8192, 28672, 80, 64, 8, 128256)
_SHAPES: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-2-7b-hf": _shape("llama", 4096, 11008, 32, 32, 32, 32000, 4096),
    "meta-llama/Llama-2-13b-hf": _shape("llama", 5120, 13824, 40, 40, 40, 32000, 4096),
    "meta-llama/Llama-2-70b-hf": _shape("llama", 8192, 28672, 80, 64, 8, 32000, 4096),
    "meta-llama/Meta-Llama-3-8B": _shape("llama", *_LLAMA_8B, 8192),
    "meta-llama/Meta-Llama-3-70B": _shape("llama", *_LLAMA_70B, 8192),
    "meta-llama/Llama-3.1-8B": _shape("llama", *_LLAMA_8B, 131072),
    "meta-llama/Llama-3.1-70B": _shape("llama", *_LLAMA_70B, 131072),
    "meta-llama/Llama-3.3-70B": _shape("llama", *_LLAMA_70B, 131072),  # published as -Instruct alone
    "meta-llama/Llama-3.2-1B": _shape("llama", 2048, 8192, 16, 32, 8, 128256, 131072, head_dim=64, **_TIED),
    "meta-llama/Llama-3.2-3B": _shape("llama", 3072, 8192, 28, 24, 8, 128256, 131072, head_dim=128, **_TIED),
    "mistralai/Mistral-7B-v0.1": _shape("mistral", 4096, 14336, 32, 32, 8, 32000, 32768, sliding_window=4096),
    "mistralai/Mistral-7B-v0.3": _shape("mistral", 4096, 14336, 32, 32, 8, 32768, 32768, sliding_window=None),
    "mistralai/Mixtral-8x7B-v0.1": _shape("mixtral", 4096, 14336, 32, 32, 8, 32000, 32768, sliding_window=None,
                                          num_local_experts=8, num_experts_per_tok=2),
    "Qwen/Qwen2.5-0.5B": _shape("qwen2", 896, 4864, 24, 14, 2, 151936, 32768, **_TIED),
    "Qwen/Qwen2.5-1.5B": _shape("qwen2", 1536, 8960, 28, 12, 2, 151936, 131072, **_TIED),
    "Qwen/Qwen2.5-3B": _shape("qwen2", 2048, 11008, 36, 16, 2, 151936, 32768, **_TIED),
    "Qwen/Qwen2.5-7B": _shape("qwen2", 3584, 18944, 28, 28, 4, 152064, 131072),
    "Qwen/Qwen2.5-14B": _shape("qwen2", 5120, 13824, 48, 40, 8, 152064, 131072),
    "Qwen/Qwen2.5-32B": _shape("qwen2", 5120, 27648, 64, 40, 8, 152064, 131072),
    "Qwen/Qwen2.5-72B": _shape("qwen2", 8192, 29568, 80, 64, 8, 152064, 131072),
    "Qwen/Qwen3-0.6B": _shape("qwen3", 1024, 3072, 28, 16, 8, 151936, 40960, **_QWEN3, **_TIED),
    "Qwen/Qwen3-1.7B": _shape("qwen3", 2048, 6144, 28, 16, 8, 151936, 40960, **_QWEN3, **_TIED),
    "Qwen/Qwen3-4B": _shape("qwen3", 2560, 9728, 36, 32, 8, 151936, 40960, **_QWEN3, **_TIED),
    "Qwen/Qwen3-8B": _shape("qwen3", 4096, 12288, 36, 32, 8, 151936, 40960, **_QWEN3),
    "Qwen/Qwen3-14B": _shape("qwen3", 5120, 17408, 40, 40, 8, 151936, 40960, **_QWEN3),
    "Qwen/Qwen3-32B": _shape("qwen3", 5120, 25600, 64, 64, 8, 151936, 40960, **_QWEN3),
    "HuggingFaceTB/SmolLM2-135M": _shape("llama", 576, 1536, 30, 9, 3, 49152, 8192, **_TIED),
    "HuggingFaceTB/SmolLM2-360M": _shape("llama", 960, 2560, 32, 15, 5, 49152, 8192, **_TIED),
    "HuggingFaceTB/SmolLM2-1.7B": _shape("llama", 2048, 8192, 24, 32, 32, 49152, 8192, **_TIED),
}  # fmt: skip
