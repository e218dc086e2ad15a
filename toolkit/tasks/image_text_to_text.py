"""Language models that see: images within conversations."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from toolkit.tasks.base import Drawn, Encoded, Features, Format, Maker, Media, Task
from toolkit.tasks.causal_lm import supervised_turns
from toolkit.tasks.labels import IGNORED, Labels


def _messages(maker: Maker, row: Any, fields: Mapping[str, Any]) -> Encoded:
    return supervised_turns(maker, fields["piece"], *fields["encoded"])


def any_size(config: Mapping[str, Any]) -> int | None:
    """Pixels of the side of the square that is one token, for a model that takes images of any size; None for one
    whose images all have the size of its config."""
    vision = config["vision_config"]
    return vision["patch_size"] * vision["spatial_merge_size"] if "temporal_patch_size" in vision else None


def image_shape(
    config: Mapping[str, Any], size: tuple[int, int] | None = None
) -> tuple[dict[str, tuple[int, ...]], dict[str, Any], int]:
    """Of one image: shapes of its float features, its integer features, and the tokens that stand for it.

    ``size``: height and width in pixels, for a model that takes images of any size (``any_size``); None: a small one.
    As the models of transformers 5.23 take them: Qwen2-VL to Qwen3-VL (patches and their grid), Idefics3 and SmolVLM
    (tiles of a sample), Gemma 3, LLaVA and InternVL (whole images). Raises KeyError for others.
    """
    vision = config["vision_config"]
    values: tuple[int, ...]
    whole: dict[str, tuple[int, ...]]
    tiles: dict[str, tuple[int, ...]]
    channels, patch = vision.get("in_channels") or vision.get("num_channels") or 3, vision.get("patch_size")
    if "temporal_patch_size" in vision:
        merge = vision["spatial_merge_size"]
        height, width = (merge * (2 if pixels is None else max(1, round(pixels / patch / merge)))
                         for pixels in size or (None, None))  # fmt: skip
        values = (height * width, channels * vision["temporal_patch_size"] * patch * patch)
        return {"pixel_values": values}, {"image_grid_thw": [[1, height, width]]}, height * width // merge**2
    side = vision["image_size"]
    height, width = (side, side) if isinstance(side, int) else side
    whole = {"pixel_values": (1, channels, height, width)}
    if "mm_tokens_per_image" in config:
        return whole, {}, config["mm_tokens_per_image"]
    patch = patch if isinstance(patch, int) else patch[0]
    patches = (height // patch) * (width // patch)
    if "scale_factor" in config:
        mask = [[[[1] * width] * height]]
        tiles = {"pixel_values": (1, 1, channels, height, width)}
        return tiles, {"pixel_attention_mask": mask}, patches // config["scale_factor"] ** 2
    if "downsample_ratio" in config:
        return whole, {}, int(patches * config["downsample_ratio"] ** 2)
    if config.get("model_type") == "llava":
        return whole, {}, patches
    raise KeyError(config.get("model_type"))


def _features(config: Mapping[str, Any], draw: random.Random) -> Features:
    import numpy as np

    floats, integers, _ = image_shape(config)
    values = np.random.default_rng(draw.getrandbits(63))
    return {name: values.standard_normal(shape, dtype=np.float32) for name, shape in floats.items()} | {
        name: np.asarray(value, dtype=np.int64) for name, value in integers.items()
    }


def image_token(config: Mapping[str, Any]) -> int:
    """The id of the tokens that stand for an image."""
    return int(config["image_token_id"] if "image_token_id" in config else config["image_token_index"])


def _tokens(config: Mapping[str, Any], count: int) -> list[int]:
    """Of ``count`` small images."""
    return _framed(config, image_shape(config)[2]) * count


def _framed(config: Mapping[str, Any], tokens: int) -> list[int]:
    """Of one image, between the tokens that frame it where the config names such."""
    framed = [image_token(config)] * tokens
    if "vision_start_token_id" in config:
        framed = [config["vision_start_token_id"], *framed, config["vision_end_token_id"]]
    return framed


def _row(config: Mapping[str, Any], count: int, size: tuple[int, int] | None) -> tuple[list[int], Features]:
    """Ids and features of ``count`` equal images; none of them is black, which some models take for no image."""
    import numpy as np

    floats, integers, tokens = image_shape(config, size)
    axis = 1 if "pixel_attention_mask" in integers else 0  # Idefics3 counts a sample's images by it
    one = {name: np.ones(shape, dtype=np.float32) for name, shape in floats.items()}
    one |= {name: np.asarray(value, dtype=np.int64) for name, value in integers.items()}
    return _framed(config, tokens) * count, {n: np.concatenate([a] * count, axis) for n, a in one.items() if count}


def _draw(drawn: Drawn, tokens: list[int]) -> list[int]:
    """The prompt carries no loss, nor does an image."""
    labels = list(tokens)
    for at in range(drawn.draw.randint(1, len(tokens) // 2)):
        labels[at] = IGNORED
    return labels


TASK = Task(
    name="image-text-to-text",
    auto_class="AutoModelForImageTextToText",
    peft_type="CAUSAL_LM",
    pipeline="image-text-to-text",
    labels=Labels.NEXT,
    formats={"messages": Format(("messages",), _messages)},
    draw=_draw,
    media=Media("image", "AutoProcessor", "pixel_values", True, _features, _tokens, _row),
    validated=True,
    why_format="conversations with images",
)
