"""Tiny models of images and sound, by their transformers config."""

from __future__ import annotations

from typing import Any

_NARROW = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
IMAGE_CLASSIFIERS: dict[str, dict[str, Any]] = {
    "vit": {"model_type": "vit", **_NARROW, "image_size": 32, "patch_size": 16},
    "convnext": {
        "model_type": "convnext", "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "image_size": 32,
    },
    "swin": {
        "model_type": "swin", "image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4],
        "window_size": 2,
    },
    "dinov2": {"model_type": "dinov2", **_NARROW, "image_size": 28, "patch_size": 14},
}  # fmt: skip
RESNET: dict[str, Any] = {
    "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic",
}  # fmt: skip
WHISPER: dict[str, Any] = {
    "model_type": "whisper", "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 96, "num_mel_bins": 8,
    "max_source_positions": 16, "max_target_positions": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 3, "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip
_TEXT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 160, "head_dim": 8, "max_position_embeddings": 512,
}  # fmt: skip
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_QWEN_IDS = {"image_token_id": 150, "video_token_id": 151, "vision_start_token_id": 152, "vision_end_token_id": 153}
_GLM_IDS = _QWEN_IDS | {"image_start_token_id": 152, "image_end_token_id": 153}
_EYE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SEEING: dict[str, dict[str, Any]] = {
    "qwen3_vl": {
        "model_type": "qwen3_vl", **_QWEN_IDS,
        "text_config": {"model_type": "qwen3_vl_text", **_TEXT, "rope_parameters": _MROPE},
        "vision_config": {
            "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "patch_size": 8,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32, "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
    },
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl", **_QWEN_IDS,
        "text_config": {"model_type": "qwen2_5_vl_text", **_TEXT, "rope_parameters": _MROPE},
        "vision_config": {
            "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "patch_size": 8,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32, "window_size": 32,
            "fullatt_block_indexes": [1],
        },
    },
    "gemma3": {
        "model_type": "gemma3", "image_token_index": 150, "image_token_id": 150, "boi_token_index": 151,
        "eoi_token_index": 152, "mm_tokens_per_image": 4,
        "text_config": {"model_type": "gemma3_text", **_TEXT, "sliding_window": 8, "pad_token_id": 0},
        "vision_config": {"model_type": "siglip_vision_model", **_EYE, "image_size": 32, "patch_size": 8},
    },
    "smolvlm": {
        "model_type": "smolvlm", "image_token_id": 150, "scale_factor": 2, "pad_token_id": 0,
        "text_config": {"model_type": "llama", **_TEXT},
        "vision_config": {**_EYE, "image_size": 32, "patch_size": 8},
    },
    "llava": {
        "model_type": "llava", "image_token_id": 150, "image_token_index": 150,
        "text_config": {"model_type": "llama", **_TEXT},
        "vision_config": {
            "model_type": "clip_vision_model", **_EYE, "image_size": 32, "patch_size": 8, "projection_dim": 32,
        },
    },
    "internvl": {
        "model_type": "internvl", "image_token_id": 150, "downsample_ratio": 0.5,
        "text_config": {"model_type": "qwen2", **_TEXT},
        "vision_config": {
            "model_type": "internvl_vision", **_EYE, "image_size": [32, 32], "patch_size": [8, 8],
        },
    },
    "qwen3_vl_moe": {
        "model_type": "qwen3_vl_moe", **_QWEN_IDS,
        "text_config": {
            "model_type": "qwen3_vl_moe_text", **_TEXT, "rope_parameters": _MROPE, "moe_intermediate_size": 32,
            "num_experts": 4, "num_experts_per_tok": 2,
        },
        "vision_config": {
            "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "patch_size": 8,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32, "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
    },
    "qwen3_5": {
        "model_type": "qwen3_5", **_QWEN_IDS,
        "text_config": {
            "model_type": "qwen3_5_text", **_TEXT, "rope_parameters": _MROPE | {"partial_rotary_factor": 1.0},
            "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 8, "linear_value_head_dim": 8,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        },
        "vision_config": {
            "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "patch_size": 8,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32, "num_position_embeddings": 16,
        },
    },
    "glm4v": {
        "model_type": "glm4v", **_GLM_IDS,
        "text_config": {"model_type": "glm4v_text", **_TEXT, "rope_parameters": _MROPE, "pad_token_id": 0},
        "vision_config": {
            "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "patch_size": 8, "image_size": 32,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32,
        },
    },
    "llava_next": {
        "model_type": "llava_next", "image_token_id": 150, "image_token_index": 150,
        "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]],
        "text_config": {"model_type": "mistral", **_TEXT},
        "vision_config": {
            "model_type": "clip_vision_model", **_EYE, "image_size": 32, "patch_size": 8, "projection_dim": 32,
        },
    },
    "mistral3": {
        "model_type": "mistral3", "image_token_id": 150, "image_token_index": 150, "spatial_merge_size": 2,
        "text_config": {"model_type": "mistral", **_TEXT},
        "vision_config": {"model_type": "pixtral", **_EYE, "head_dim": 8, "image_size": 64, "patch_size": 8},
    },
    "llama4": {
        "model_type": "llama4", "image_token_index": 150, "boi_token_index": 151, "eoi_token_index": 152,
        "text_config": {
            "model_type": "llama4_text", **_TEXT, "intermediate_size_mlp": 64, "num_local_experts": 2,
            "layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 16,
        },
        "vision_config": {
            "model_type": "llama4_vision_model", **_EYE, "image_size": 32, "patch_size": 8, "vision_output_dim": 32,
            "projector_input_dim": 32, "projector_output_dim": 32, "intermediate_size": 128,
        },
    },
    "aya_vision": {
        "model_type": "aya_vision", "image_token_index": 150, "image_token_id": 150,
        "text_config": {"model_type": "cohere2", **_TEXT, "sliding_window": 8, "pad_token_id": 0},
        "vision_config": {"model_type": "siglip_vision_model", **_EYE, "image_size": 32, "patch_size": 8},
    },
    "vipllava": {
        "model_type": "vipllava", "image_token_id": 150, "image_token_index": 150, "vision_feature_layer": [-2, 1],
        "text_config": {"model_type": "llama", **_TEXT},
        "vision_config": {
            "model_type": "clip_vision_model", **_EYE, "image_size": 32, "patch_size": 8, "projection_dim": 32,
        },
    },
}  # fmt: skip
RELATIVES: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "model_type": "qwen2_vl", **_QWEN_IDS,
        "text_config": {"model_type": "qwen2_vl_text", **_TEXT, "rope_parameters": _MROPE},
        "vision_config": {
            "depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 8, "spatial_merge_size": 2,
            "temporal_patch_size": 2, "mlp_ratio": 2,
        },
    },
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe", **_QWEN_IDS,
        "text_config": SEEING["qwen3_5"]["text_config"] | {
            "model_type": "qwen3_5_moe_text", "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
            "num_experts": 4, "num_experts_per_tok": 2,
        },
        "vision_config": SEEING["qwen3_5"]["vision_config"],
    },
    "glm46v": SEEING["glm4v"] | {
        "model_type": "glm46v", "vision_config": SEEING["glm4v"]["vision_config"] | {"model_type": "glm4v_vision"},
    },
    "pixtral": {
        "model_type": "llava", "image_token_id": 150, "image_token_index": 150, "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full", "text_config": {"model_type": "mistral", **_TEXT},
        "vision_config": SEEING["mistral3"]["vision_config"],
    },
    "idefics3": SEEING["smolvlm"] | {"model_type": "idefics3"},
    "cohere2_vision": SEEING["aya_vision"] | {"model_type": "cohere2_vision"},
}  # fmt: skip
"""Of the same kinds, under names of their own."""
