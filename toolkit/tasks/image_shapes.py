"""What models that see take of an image: shapes of features, and the tokens that stand for it.

Read from the models of transformers 5.23 (``get_image_features`` of each family). A family that is not here is refused:
which tokens stand for an image, and what a model wants to know of them, decides what it learns (PaliGemma's
``token_type_ids`` open the prompt to attention in both directions, Gemma 3's open the image).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.errors import InputError

Config = Mapping[str, Any]
Size = tuple[int, int]
"""Height and width in pixels."""
KNOWN = (
    "Qwen2-VL to Qwen3.5, GLM-4.1V to 4.6V, Gemma 3, Llama 4, LLaVA, LLaVA-NeXT, VipLlava, Mistral 3, Pixtral, "
    "InternVL, Idefics3, SmolVLM, Aya Vision, Command A Vision"
)


@dataclass(frozen=True)
class ImageShape:
    """Of one image: shapes of its float features, its integer features, and how many tokens stand for it."""

    floats: dict[str, tuple[int, ...]]
    integers: dict[str, Any]
    tokens: int
    size: Size | None = None
    """As the model sees it, where that varies."""


def image_shape(config: Config, size: Size | None = None) -> ImageShape:
    """``size``: of the image, for a model whose images may differ (``size_step``); None: a small one.

    Raises InputError for a model whose images are not known.
    """
    return _family(config).shape(config, size)


def check_images(config: Config) -> None:
    """Raise InputError for a model whose images are not known, by its config file, which may leave out defaults."""
    try:
        _family(config)
    except InputError:
        import transformers

        if config.get("model_type") not in transformers.CONFIG_MAPPING:
            raise
        _family(transformers.AutoConfig.for_model(**config).to_dict())


def size_step(config: Config) -> int | None:
    """Pixels by which sizes of images differ, for a model that takes images of any size; None for one whose images all
    have the size of its config. Raises InputError for a model whose images are not known."""
    return _family(config).step(config)


def image_token(config: Config) -> int:
    """The id of the tokens that stand for an image."""
    return int(config["image_token_id"] if "image_token_id" in config else config["image_token_index"])


@dataclass(frozen=True)
class _Family:
    fits: Callable[[Config, Config], bool]
    """By the model's config and that of its vision tower."""
    shape: Callable[[Config, Size | None], ImageShape]
    step: Callable[[Config], int | None] = lambda config: None


def _family(config: Config) -> _Family:
    vision = config.get("vision_config")
    if isinstance(vision, Mapping):
        for family in _FAMILIES:
            if family.fits(config, vision):
                return family
    raise InputError(
        f"model.task: image-text-to-text does not know the images of {config.get('model_type')} (known: {KNOWN}); "
        "for text alone, use model.task: causal-lm where transformers has the model as one"
    )


def _grid(config: Config, size: Size | None) -> ImageShape:
    """Patches of all images in one row, and the grid of each (Qwen2-VL)."""
    vision = config["vision_config"]
    merge, patch = vision["spatial_merge_size"], vision["patch_size"]
    height, width = (merge * max(1, round(pixels / patch / merge))
                     for pixels in size or (2 * merge * patch, 2 * merge * patch))  # fmt: skip
    values = (height * width, _channels(vision) * vision["temporal_patch_size"] * patch * patch)
    grid = {"image_grid_thw": [[1, height, width]]}
    return ImageShape({"pixel_values": values}, grid, height * width // merge**2, (height * patch, width * patch))


def _grid_step(config: Config) -> int:
    return int(config["vision_config"]["patch_size"] * config["vision_config"]["spatial_merge_size"])


def _pixtral(config: Config, size: Size | None) -> ImageShape:
    """Whole images of any size, padded to the largest, and their sizes (Pixtral's tower, in LLaVA or Mistral 3)."""
    step = _pixtral_step(config)
    height, width = (step * max(1, -(-pixels // step)) for pixels in size or (2 * step, 2 * step))
    values = (1, _channels(config["vision_config"]), height, width)
    sizes = {"image_sizes": [[height, width]]}
    return ImageShape({"pixel_values": values}, sizes, height * width // step**2, (height, width))


def _pixtral_step(config: Config) -> int:
    return int(config["vision_config"]["patch_size"] * config.get("spatial_merge_size", 1))


def _pinpoints(config: Config, size: Size | None) -> ImageShape:
    """The image in small, and in tiles with a token at the end of each row of patches (LLaVA-NeXT)."""
    import torch
    from transformers.models.llava_next import modeling_llava_next as model

    vision = config["vision_config"]
    side, points = vision["image_size"], [list(point) for point in config["image_grid_pinpoints"]]
    size = size or min(map(tuple, points), key=lambda point: point[0] * point[1])
    patches = side // vision["patch_size"]
    tiles = model.get_anyres_image_grid_shape(size, points, side)
    seen = model.unpad_image(torch.empty(1, tiles[0] * patches, tiles[1] * patches, device="meta"), size).shape[1:]
    values = (1, 1 + tiles[0] * tiles[1], _channels(vision), side, side)
    tokens = patches**2 + seen[0] * (seen[1] + 1)
    return ImageShape({"pixel_values": values}, {"image_sizes": [list(size)]}, tokens, size)


def _whole(tokens: Callable[[Config, int], int]) -> Callable[[Config, Size | None], ImageShape]:
    """One image or tile of the size in the vision tower's config; ``tokens`` by the config and its patches."""

    def shape(config: Config, size: Size | None) -> ImageShape:
        vision = config["vision_config"]
        height, width = _sides(vision["image_size"])
        rows, columns = _sides(vision["patch_size"])
        count = tokens(config, (height // rows) * (width // columns))
        return ImageShape({"pixel_values": (1, _channels(vision), height, width)}, {}, count)

    return shape


def _sample_tiles(config: Config, size: Size | None) -> ImageShape:
    """Tiles of a sample, and which of their pixels are the image's (Idefics3)."""
    one = _whole(lambda config, patches: patches // config["scale_factor"] ** 2)(config, size)
    channels, height, width = one.floats["pixel_values"][1:]
    mask = {"pixel_attention_mask": [[[[1] * width] * height]]}
    return ImageShape({"pixel_values": (1, 1, channels, height, width)}, mask, one.tokens)


def _sides(value: int | list[int] | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _channels(vision: Config) -> int:
    return int(vision.get("in_channels") or vision.get("num_channels") or 3)


def _with_class_token(config: Config, patches: int) -> int:
    """LLaVA's strategy «full» keeps the token that CLIP puts before the patches."""
    full = config.get("vision_feature_select_strategy") == "full"
    return patches + int(full and config["vision_config"].get("model_type") == "clip_vision_model")


def _shuffled(config: Config, patches: int) -> int:
    return round(patches * config["vision_config"]["pixel_shuffle_ratio"] ** 2)


def _named(*types: str) -> Callable[[Config, Config], bool]:
    return lambda config, vision: config.get("model_type") in types


_FAMILIES = (
    _Family(lambda c, v: {"temporal_patch_size", "spatial_merge_size"} <= v.keys(), _grid, _grid_step),
    _Family(lambda c, v: v.get("model_type") == "pixtral", _pixtral, _pixtral_step),
    _Family(_named("llava_next"), _pinpoints, lambda c: int(c["vision_config"]["patch_size"])),
    _Family(_named("llama4"), _whole(_shuffled)),
    _Family(lambda c, v: "mm_tokens_per_image" in c, _whole(lambda c, n: c["mm_tokens_per_image"])),
    _Family(_named("idefics3", "smolvlm"), _sample_tiles),
    _Family(_named("aya_vision", "cohere2_vision"), _whole(lambda c, n: n // c["downsample_factor"] ** 2)),
    _Family(lambda c, v: "downsample_ratio" in c, _whole(lambda c, n: int(n * c["downsample_ratio"] ** 2))),
    _Family(_named("llava", "vipllava"), _whole(_with_class_token)),
)
