"""A small config of every model type of the installed transformers, made from its config class's own defaults.

Sizes are capped by what their keys are called; nothing here names a model type but where a size of one depends on
another in a way that no name says (``_TIED``).
"""

from __future__ import annotations

import re
from typing import Any

from toolkit.errors import first_line

_CAPS: tuple[tuple[str, int], ...] = (
    (r".*(max_(en|de)?(coder_)?position|max_seq|max_source|max_target|n_positions|n_ctx|max_len|seq_length).*", 128),
    (r".*vocab_size.*|.*num_embeddings", 128),
    (r".*(num|n)_.*(layers?|blocks)|n_layers?|depth|layers|.*_layers", 2),
    (r".*(kv|key_value|key|value|n_kv|n_head_kv|global_key_value|groups?)_heads?|.*n_head_kv|multi_query_group_num", 2),
    (r".*heads?|.*attention_heads|.*n_heads", 4),
    (r".*qk_rope_head_dim|.*rope_head_dim|rotary_dim", 8),
    (r".*head_dim|.*head_size|kv_channels|d_kv|attention_key_size|.*linear_(key|value)_head_dim", 8),
    (r".*lora_rank|.*(_rank|_rank_dim)|.*lora_dim|.*low_rank_dim.*", 16),
    (r".*(moe|expert|ffn|intermediate|inner|feed_forward|mlp|d_ff).*(size|dim|channels)|n_inner|d_ff", 64),
    (r".*experts_per_tok(en)?|.*topk|.*top_k|moe_k|.*top_k_experts", 2),
    (r".*(experts|expert_num).*", 4),
    (r"n_group|topk_group|.*n_groups?|.*group_num", 1),
    (r".*(hidden|embed|d_model|n_embd|model|embedding|embd|width|projection).*(size|dim)?|dim|width|d_model", 32),
    (r".*(window|chunk|block|local).*(size|length)?", 8),
    (r".*state_size|d_state|.*_d_state|.*time_step_rank", 8),
)  # fmt: skip
_NOT_A_SIZE = r".*(_id|_ids|_index|_interval|_freq|_period|_every.*|_step|stride|dropout|kernel.*|factor|_token)$|id$"
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_d_state": 8}
_TIED: dict[str, dict[str, Any]] = {
    "bamba": _MAMBA,
    "bailing_hybrid": {"num_experts": 4, "num_experts_per_token": 2, "num_expert_group": 1, "topk_group": 1},
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "cpmant": {"dim_ff": 64},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots3_note_text": {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "sliding_window": 8,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"],
        "intermediate_size": 64,
    },
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0}},
    "gemma4_unified_assistant": {"text_config": {"hidden_size_per_layer_input": 0}},
    "granitemoehybrid": _MAMBA,
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "kolibri1": {"num_experts": 4},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "phi4_multimodal": {"audio_config": {"nemo_conv_channels": 32}},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 16,
        "indexer_compress_ratio": 2,
        "ple_embed_dim": 32,
        "eos_token_id": 2,
        "ple_layer_ids": [1],
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 64,
        "split_ngram_parts": 2,
    },
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 16]},
    "xlm": {"emb_dim": 32},
    "xlstm": {"hidden_size": 128, "max_inference_chunksize": 128},
    "xlnet": {"d_head": 8},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
}
"""What goes with a size of a type in a way that no name says, and what its class leaves open."""


def types_of(auto_class: str) -> list[str]:
    """The model types that transformers has a model of this auto class for."""
    import transformers

    return list(getattr(transformers, auto_class)._model_mapping._model_mapping)


def small_config(kind: str, auto_class: str) -> tuple[dict[str, Any], str | None]:
    """A model type's small config, and why no model can be made of it."""
    import torch
    import transformers

    try:
        config = small(transformers.CONFIG_MAPPING[kind])
        with torch.device("meta"):
            getattr(transformers, auto_class).from_config(config)
    except Exception as error:  # whatever a model's own code raises
        return {}, f"{type(error).__name__}: {first_line(error)}"
    unset = {"transformers_version", "architectures", "dtype", "_name_or_path"}
    return {key: value for key, value in config.to_dict().items() if key not in unset}, None


def has_sdpa(config: dict[str, Any], auto_class: str) -> bool:
    """Whether the model's class can use torch's attention; some have eager attention alone."""
    import transformers

    kind = transformers.CONFIG_MAPPING[config["model_type"]]
    return bool(getattr(getattr(transformers, auto_class)._model_mapping[kind], "_supports_sdpa", False))


def small(config_class: Any, hidden: int = 32) -> Any:
    """An instance of ``config_class`` with small sizes; nested configs likewise."""
    return config_class(**_capped(config_class(), hidden))


def _capped(config: Any, hidden: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    written = config.to_dict()
    counts = (written.get(key) for key in ("num_hidden_layers", "n_layer", "num_layers"))
    layers = next((count for count in counts if isinstance(count, int)), 0)
    for key, value in written.items():
        nested = vars(config).get(key)
        if hasattr(nested, "to_dict"):
            values[key] = _capped(nested, hidden) | {"model_type": nested.model_type}
        elif isinstance(value, list) and 2 < layers == len(value):
            kinds = list({str(kind): kind for kind in value}.values())
            values[key] = (kinds * 2)[:2]
        elif type(value) is int and getattr(type(config), key, None) is not None:  # else made of others
            values[key] = _cap(key, value, hidden)
    heads, groups = (written.get(key) for key in ("num_attention_heads", "num_key_value_heads"))
    if heads == groups and "num_key_value_heads" in values:
        values["num_key_value_heads"] = values["num_attention_heads"]
    return _merged(values, _TIED.get(config.model_type, {}))


def _merged(values: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    for key, value in more.items():
        values[key] = _merged(values.get(key, {}), value) if isinstance(value, dict) else value
    return values


def _cap(key: str, value: int, hidden: int) -> int:
    if key.endswith(("_token_id", "token_index")):
        return value if value < 120 else 100 + value % 20
    if re.fullmatch(_NOT_A_SIZE, key):
        return value
    for pattern, cap in _CAPS:
        if re.fullmatch(pattern, key):
            return min(value, hidden if cap == 32 else cap)
    return value
