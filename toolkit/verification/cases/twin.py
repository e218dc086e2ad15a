"""The twin: a model of the same architecture, narrower and with fewer layers, so that any recipe verifies here.

Only sizes change. What decides how a model computes (kinds of layers, grouped heads, experts, biases, tied weights,
rotary scaling, dropout) is kept.
"""

from __future__ import annotations

import math
from typing import Any

from toolkit.errors import InputError
from toolkit.model.new_tokens import ROWS
from toolkit.recipe.adapter_methods import METHODS, REBUILT, Method
from toolkit.recipe.adapter_options import options_of
from toolkit.strategies.layouts.expert.spec import NUMBERS

_HEADS, _HEAD_DIM = 4, 16
_WIDTH = _HEADS * _HEAD_DIM
_LAYERS = 2
_VOCABULARY = 512
_IMAGE = 64
"""Pixels of a side where a model has no patches: five halvings leave four places for batch statistics."""
_STAGE = 16
"""Channels of a convolutional model's first stage; twice as many in each of the next."""
_SMALL_INPUT = 96
"""Pixels of a side, or positions of a recording, of a model that needs no twin."""

_WIDTH_KEYS = ("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "word_embed_proj_dim", "embedding_size")
_HEAD_KEYS = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
)
_LAYER_KEYS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "num_decoder_layers",
    "encoder_layers",
    "decoder_layers",
)
# Feed-forward widths keep what they are to the model: twice its width.
_FEED_FORWARD_KEYS = (
    "intermediate_size",
    "ffn_dim",
    "n_inner",
    "d_ff",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "ffn_hidden_size",
)
_CAPS = {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "zero_expert_num": 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": _VOCABULARY,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": _HEAD_DIM,
    "d_kv": _HEAD_DIM,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "sliding_window": 8,
    "first_k_dense_replace": 1,
    "max_source_positions": 24,
    "max_target_positions": 64,
    "num_mel_bins": 16,
}
_TOKEN_KEYS = (
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "decoder_start_token_id",
    "unk_token_id",
    "sep_token_id",
    "cls_token_id",
)


def _nested(config: dict[str, Any]) -> list[str]:
    """The keys of the configs that a config nests."""
    return [key for key, value in config.items() if isinstance(value, dict) and "model_type" in value]


def twin_config(config: dict[str, Any], parts_of_a_layer: int = 1, stages: int = 1, experts: int = 1) -> dict[str, Any]:
    """A smaller config of the same model type; ``config`` itself where it is small already.

    ``parts_of_a_layer`` ranks divide its heads between them (`strategy.mesh`): each has as many, and of a group's keys
    too. ``stages`` divide its layers: each has one at least. ``experts`` ranks divide its experts: each has as many."""
    if "model_type" not in config:
        raise InputError("model: its config has no model_type")
    nested = _nested(config)
    if all(_is_small(config[name]) for name in nested) if nested else _is_small(config):
        return dict(config)
    twin = dict(config)
    for name in nested:
        twin[name] = _narrowed(twin[name], parts_of_a_layer, stages, experts)
    return _narrowed(twin, parts_of_a_layer, stages, experts)


_TEXT = ("prompt_tuning_init_text", "tokenizer_name_or_path", "tokenizer_kwargs")
_OF_THE_MODEL = ("token_dim", "num_attention_heads", "num_layers")


def twin_adapter(adapter: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """A recipe's adapter for the twin with ``config``: sizes that its layers have, layers and tokens that it has."""
    method = METHODS[adapter["method"]]
    options = {key: value for key, value in adapter["options"].items() if key not in (*_TEXT, *_OF_THE_MODEL)}
    twin = dict(adapter) | {"path": None, "options": options}
    caps = dict(method.twin)
    start = options.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(REBUILT):
        caps["r"] = 8
    for key, cap in caps.items():
        own = twin if key in method.keys else options
        value = min(own[key], cap) if own.get(key) is not None else _default(method, key, cap)
        if value is not None:
            own[key] = value
    if options.get("prompt_tuning_init") == "TEXT":
        options["prompt_tuning_init"] = "RANDOM"  # the text's tokens are not in the twin's vocabulary
    if options.get("layers_to_transform") is not None:
        layers = next((config[key] for key in _LAYER_KEYS if isinstance(config.get(key), int)), _LAYERS)
        asked = options["layers_to_transform"]
        kept = [layer for layer in (asked if isinstance(asked, list) else [asked]) if layer < layers]
        options["layers_to_transform"] = kept or [layers - 1]
    vocabulary = config.get("vocab_size", _VOCABULARY)
    for key in ROWS:
        if options.get(key):
            options[key] = _within(options[key], vocabulary)
    if adapter["path"] is not None:
        for key, example in method.required.items():
            options.setdefault(key, min(example, caps.get(key, example)) if isinstance(example, int) else example)
    return twin


def _default(method: Method, key: str, cap: int) -> int | None:
    """The value of an option that the recipe does not set, no larger than ``cap``; None: PEFT's own is smaller, or
    turns it off."""
    default = options_of(method.name).get(key)
    number = int(default.default) if default is not None and default.default.isdecimal() else None
    if key == "r":
        return cap if number is None and method.name != "oft" else None
    return None if number is None or number <= cap else cap


def _within(indices: Any, vocabulary: int) -> Any:
    """Token ids within the twin's vocabulary, each once; the first three may be padding and the like."""
    if isinstance(indices, dict):
        return {name: _within(own, vocabulary) for name, own in indices.items()}
    inside = (index if index < vocabulary else 3 + index % (vocabulary - 3) for index in indices)
    return list(dict.fromkeys(inside))


def _is_small(config: dict[str, Any]) -> bool:
    width = next((config[key] for key in _WIDTH_KEYS if isinstance(config.get(key), int)), None)
    layers = [config[key] for key in _LAYER_KEYS if isinstance(config.get(key), int)]
    if width is None and isinstance(config.get("hidden_sizes"), list):
        width, layers = max(config["hidden_sizes"]), list(config.get("depths") or layers)
    vocabulary = config.get("vocab_size", 0)
    inputs = config.get("image_size") or config.get("max_source_positions") or 0
    side = max(inputs) if isinstance(inputs, list) else inputs
    return (
        width is not None
        and width <= 2 * _WIDTH
        and max(layers, default=0) <= 4
        and vocabulary <= 4 * _VOCABULARY
        and side <= _SMALL_INPUT
    )


def _narrowed(config: dict[str, Any], parts_of_a_layer: int, stages: int, experts: int) -> dict[str, Any]:
    twin = dict(config)
    groups = math.lcm(2, parts_of_a_layer)
    of_twin = max(_HEADS, 2 * groups) if parts_of_a_layer > 1 else _HEADS
    width = of_twin * _HEAD_DIM
    _shorten(twin, stages)
    heads = next((twin[key] for key in _HEAD_KEYS if isinstance(twin.get(key), int)), None)
    for key in _HEAD_KEYS:
        if isinstance(twin.get(key), int):
            twin[key] = of_twin
    for key in ("num_key_value_heads", "num_kv_heads", "n_head_kv"):
        if isinstance(twin.get(key), int):
            # All heads share one key, each has its own, or groups do.
            twin[key] = {1: 1, heads: of_twin}.get(twin[key], groups)
    for key in _WIDTH_KEYS:
        if isinstance(twin.get(key), int):
            twin[key] = width
    for key in _FEED_FORWARD_KEYS:
        if isinstance(twin.get(key), int):
            twin[key] = 2 * width
    for key, cap in _CAPS.items():
        if isinstance(twin.get(key), int):
            twin[key] = min(twin[key], math.lcm(cap, experts) if key in NUMBERS else cap)
    _fit_heads(twin, config)
    _shrink_vocabulary(twin)
    _shrink_image(twin)
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(twin.get(key), dict):
            twin[key] = _without_factors(twin[key])
    return twin


def _shrink_image(twin: dict[str, Any]) -> None:
    """Two or three patches a side; stages of convolutional models with a block each, and narrow."""
    patch = twin.get("patch_size")
    if "image_size" in twin or "num_channels" in twin:
        size = 3 * patch if isinstance(patch, int) else _IMAGE
        # Swin merges patches by twos between its stages, in windows of window_size.
        stages = len(twin.get("depths") or ())
        if stages and isinstance(patch, int):
            size = patch * 2 ** (stages - 1) * 2
        twin["image_size"] = min(size, twin["image_size"]) if isinstance(twin.get("image_size"), int) else size
    if isinstance(twin.get("window_size"), int):
        twin["window_size"] = min(twin["window_size"], 2)
    if isinstance(twin.get("depths"), list):
        twin["depths"] = [min(depth, 2) for depth in twin["depths"]]
    if isinstance(twin.get("hidden_sizes"), list):
        twin["hidden_sizes"] = [min(size, _STAGE * 2**at) for at, size in enumerate(twin["hidden_sizes"])]
    if isinstance(twin.get("embedding_size"), int) and "hidden_sizes" in twin:
        twin["embedding_size"] = min(twin["embedding_size"], _STAGE)


def _shorten(twin: dict[str, Any], stages: int) -> None:
    """As few layers, from the first, as have every kind of them; lists by layer are as long."""
    count = next((twin[key] for key in _LAYER_KEYS if isinstance(twin.get(key), int)), 0)
    by_layer = [key for key, value in twin.items() if isinstance(value, list) and 2 < len(value) == count]
    if isinstance(twin.get("layer_types"), list) and "layer_types" not in by_layer:
        by_layer.append("layer_types")
    layers = max(_LAYERS, stages, *(_layers(twin[key]) for key in by_layer))
    if twin.get("num_kv_shared_layers"):  # the last layers attend to keys of earlier ones of their kind
        layers *= 2
        twin["num_kv_shared_layers"] = layers // 2
    for key in _LAYER_KEYS:
        if isinstance(twin.get(key), int):
            twin[key] = min(twin[key], layers)
    for key in by_layer:
        twin[key] = twin[key][:layers]
    for key, value in twin.items():  # Gemma 4: what differs in some layers, by their numbers
        if key.endswith("per_layer_config") and isinstance(value, dict):
            inside = {str(number) for number in range(layers)}
            twin[key] = {number: one for number, one in value.items() if str(number) in inside}
    if isinstance(twin.get("attention_types"), list) and count:  # GPT-Neo: kinds in turn, and how many times
        turn = twin["attention_types"][0][0]
        twin["attention_types"] = [[turn, -(-layers // len(turn))]]
        twin.update({key: len(turn) * -(-layers // len(turn)) for key in _LAYER_KEYS if key in twin})


def _layers(kinds: list[Any]) -> int:
    """Enough layers that every kind of them is there. Sizes are no kinds: all of them shrink alike."""
    if not kinds or not isinstance(kinds[0], str):
        return _LAYERS
    return max(_LAYERS, *(kinds.index(kind) + 1 for kind in set(kinds)))


def _fit_heads(twin: dict[str, Any], config: dict[str, Any]) -> None:
    """Heads whose number and size make a width together: of a state space, twice the model's (``expand``)."""
    width = next((twin[key] for key in _WIDTH_KEYS if isinstance(twin.get(key), int)), 0)
    for expand, number, size in (
        ("mamba_expand", "mamba_n_heads", "mamba_d_head"), ("expand", "num_heads", "head_dim"),
        ("expand", "mamba_num_heads", "mamba_head_dim"),
    ):  # fmt: skip
        if all(isinstance(twin.get(key), int | float) for key in (expand, number)):
            inner = int(twin[expand] * width)
            twin[size], twin[number] = _HEAD_DIM, inner // _HEAD_DIM
            if isinstance(twin.get("mamba_d_ssm"), int):
                twin["mamba_d_ssm"] = inner
    if isinstance(twin.get("d_head"), int):
        twin["d_head"] = _HEAD_DIM
    for key, value in twin.items():
        if key.endswith("_per_layer") and isinstance(value, list) and "heads" in key:
            twin[key] = [_HEADS] * len(value)
        elif key in _FEED_FORWARD_KEYS and isinstance(value, list):
            twin[key] = [2 * width] * len(value)


def _shrink_vocabulary(twin: dict[str, Any]) -> None:
    if not isinstance(twin.get("vocab_size"), int):
        return
    twin["vocab_size"] = min(twin["vocab_size"], _VOCABULARY)
    for place, key in enumerate(_TOKEN_KEYS):
        value = twin.get(key)
        if isinstance(value, list):
            value = value[0] if value else None
        if isinstance(value, int):
            twin[key] = value if 0 <= value < twin["vocab_size"] else place % 3
    # transformers wants a padding index within the vocabulary where there is one at all.


def _without_factors(rope: dict[str, Any]) -> dict[str, Any]:
    """longrope lists a factor per pair of a head's dimensions: as many as the twin's heads have."""
    return {key: value[: _HEAD_DIM // 2] if isinstance(value, list) else value for key, value in rope.items()}
