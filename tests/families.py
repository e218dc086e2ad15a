"""Tiny models of many families, by their transformers config. `python -m tests.families OUT.md` verifies them."""

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
    "gpt_oss": {
        "attention": "eager",
        "config": {
            "model_type": "gpt_oss",
            **_GROUPED,
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
        },
    },
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

_SMALL = _GROUPED | {"vocab_size": 96}
_ALONE = _NARROW | {"vocab_size": 96}
_SEQ2SEQ = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "bos_token_id": 0,
    "forced_eos_token_id": 2,
}


def _causal(kind: str, base: dict[str, Any] = _SMALL, **own: Any) -> dict[str, Any]:
    return {"config": {"model_type": kind, **base, **own}}


def _labelling(kind: str, **own: Any) -> dict[str, Any]:
    config = {"model_type": kind, **_ALONE, "max_position_embeddings": 64, **own}
    return {"task": "sequence-classification", "num_labels": 3, "config": config}


_ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}

EVERY_FAMILY: dict[str, dict[str, Any]] = {
    "llama": _causal("llama"),
    "mistral": _causal("mistral", sliding_window=8),
    "qwen2": _causal("qwen2"),
    "qwen3": _causal("qwen3", head_dim=8),
    "gemma": _causal("gemma", head_dim=8),
    "gemma2": _causal("gemma2", head_dim=8, sliding_window=8, query_pre_attn_scalar=8) | {"attention": "eager"},
    "gemma3_text": _causal("gemma3_text", head_dim=8, sliding_window=8, query_pre_attn_scalar=8),
    "phi": _causal("phi", _ALONE),
    "phi3": _causal("phi3", pad_token_id=0, bos_token_id=1, eos_token_id=2),
    "gpt2": _causal("gpt2", {}, n_embd=32, n_layer=2, n_head=4, vocab_size=96, n_positions=64),
    "gpt_neo": _causal(
        "gpt_neo", {}, hidden_size=32, num_layers=2, num_heads=4, vocab_size=96, max_position_embeddings=64,
        attention_types=[[["global", "local"], 1]], window_size=8, intermediate_size=64,
    )
    | {"attention": "eager"},
    "gpt_neox": _causal("gpt_neox", _ALONE),
    "gptj": _causal("gptj", {}, n_embd=32, n_layer=2, n_head=4, vocab_size=96, n_positions=64, rotary_dim=4)
    | {"attention": "eager"},
    "codegen": _causal("codegen", {}, n_embd=32, n_layer=2, n_head=4, vocab_size=96, n_positions=64, rotary_dim=4)
    | {"attention": "eager"},
    "gpt_bigcode": _causal("gpt_bigcode", {}, n_embd=32, n_layer=2, n_head=4, vocab_size=96, n_positions=64),
    "opt": _causal(
        "opt", {}, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=96,
        max_position_embeddings=64, word_embed_proj_dim=32,
    ),
    "bloom": _causal("bloom", {}, hidden_size=32, n_layer=2, n_head=4, vocab_size=96) | {"attention": "eager"},
    "falcon": _causal("falcon", {}, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=96),
    "arcee": _causal("arcee", bos_token_id=1, eos_token_id=2),
    "apertus": _causal("apertus"),
    "olmo": _causal("olmo"),
    "olmo2": _causal("olmo2"),
    "olmo3": _causal("olmo3", sliding_window=8),
    "stablelm": _causal("stablelm"),
    "starcoder2": _causal("starcoder2"),
    "cohere": _causal("cohere"),
    "cohere2": _causal("cohere2", sliding_window=8),
    "granite": _causal("granite"),
    "smollm3": _causal("smollm3", pad_token_id=0, bos_token_id=1, eos_token_id=2),
    "ernie4_5": _causal("ernie4_5", head_dim=8),
    "glm": _causal("glm", head_dim=8, pad_token_id=0),
    "glm4": _causal("glm4", head_dim=8, pad_token_id=0),
    "helium": _causal("helium", head_dim=8),
    "exaone4": _causal("exaone4", sliding_window=8),
    "seed_oss": _causal("seed_oss", head_dim=8),
    "nemotron": _causal("nemotron"),
    "mixtral": _causal("mixtral", num_local_experts=4, num_experts_per_tok=2),
    "granitemoe": _causal("granitemoe", num_local_experts=4, num_experts_per_tok=2),
    "gpt_oss": _causal("gpt_oss", head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=8)
    | {"attention": "eager"},
    "deepseek_v3": _causal(
        "deepseek_v3", _SMALL | {"num_key_value_heads": 4}, n_routed_experts=4, n_shared_experts=1,
        first_k_dense_replace=1, n_group=2, topk_group=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=8, **_ROUTED,
    ),
    "qwen3_moe": _causal("qwen3_moe", head_dim=8, num_experts=4, **_ROUTED),
    "olmoe": _causal("olmoe", num_experts=4, num_experts_per_tok=2),
    "lfm2": _causal("lfm2", layer_types=["conv", "full_attention"]),
    "t5": {"task": "seq2seq-lm", "config": FAMILIES["t5"]["config"] | {"vocab_size": 96}},
    "bart": {"task": "seq2seq-lm", "config": {"model_type": "bart", **_SEQ2SEQ}},
    "bert": _labelling("bert"),
    "roberta": _labelling("roberta", pad_token_id=1),
    "electra": _labelling("electra", embedding_size=32),
    "distilbert": {
        "task": "sequence-classification",
        "num_labels": 3,
        "config": {
            "model_type": "distilbert", "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 96,
            "max_position_embeddings": 64,
        },
    },
    "modernbert": _labelling("modernbert", local_attention=8, pad_token_id=0, cls_token_id=1, sep_token_id=2),
}  # fmt: skip
"""Small enough to verify in a second or two: what `python -m tests.fuzz_recipes` draws from."""

_SCANNED = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 8}
_BOTH = ["linear_attention", "full_attention"]
HYBRIDS: dict[str, dict[str, Any]] = {
    "mamba": _causal("mamba", {}, hidden_size=32, num_hidden_layers=2, state_size=8, vocab_size=96, time_step_rank=4),
    "mamba2": _causal(
        "mamba2", {}, hidden_size=32, num_hidden_layers=2, state_size=8, vocab_size=96, num_heads=8, head_dim=8,
        n_groups=2, chunk_size=8,
    ),
    "falcon_h1": _causal("falcon_h1", head_dim=8, mamba_d_ssm=64, **_SCANNED),
    "bamba": _causal("bamba", attn_layer_indices=[1], **_SCANNED),
    "jamba": _causal(
        "jamba", mamba_d_state=8, mamba_dt_rank=4, num_experts=2, attn_layer_period=2, attn_layer_offset=1,
        expert_layer_period=2, expert_layer_offset=1,
    ),
    "nemotron_h": _causal(
        "nemotron_h", head_dim=8, mamba_num_heads=8, mamba_head_dim=8, n_groups=2, ssm_state_size=8, chunk_size=8,
        layers_block_type=["mamba", "attention"],
    ),
    "granitemoehybrid": _causal(
        "granitemoehybrid", num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=32,
        layer_types=["mamba", "attention"], **_SCANNED,
    ),
    "qwen3_next": _causal(
        "qwen3_next", head_dim=8, num_experts=4, shared_expert_intermediate_size=32, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8, layer_types=_BOTH, **_ROUTED,
    ),
    "lfm2_moe": _causal(
        "lfm2_moe", layer_types=["conv", "full_attention"], num_experts=4, num_dense_layers=1, **_ROUTED
    ),
    "minimax": _causal(
        "minimax", head_dim=8, num_local_experts=4, num_experts_per_tok=2, layer_types=_BOTH, block_size=8
    ),
}  # fmt: skip
"""State-space and linear-attention layers, some beside attention: verified by `python -m tests.families`."""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parent))
    from family_table import main

    sys.exit(main())
