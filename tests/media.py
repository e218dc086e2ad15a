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
WHISPER: dict[str, Any] = {
    "model_type": "whisper", "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 96, "num_mel_bins": 8,
    "max_source_positions": 16, "max_target_positions": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 3, "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip
