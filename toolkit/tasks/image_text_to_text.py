"""Language models that see: images within conversations."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from toolkit.tasks.base import Drawn, Encoded, Features, Format, Maker, Media, Task
from toolkit.tasks.causal_lm import supervised_turns
from toolkit.tasks.image_shapes import check_images, image_shape, image_token
from toolkit.tasks.labels import IGNORED, Labels


def _messages(maker: Maker, row: Any, fields: Mapping[str, Any]) -> Encoded:
    return supervised_turns(maker, fields["piece"], *fields["encoded"])


def _features(config: Mapping[str, Any], draw: random.Random) -> Features:
    import numpy as np

    image = image_shape(config)
    values = np.random.default_rng(draw.getrandbits(63))
    return {name: values.standard_normal(shape, dtype=np.float32) for name, shape in image.floats.items()} | {
        name: np.asarray(value, dtype=np.int64) for name, value in image.integers.items()
    }


def _tokens(config: Mapping[str, Any], count: int) -> list[int]:
    """Of ``count`` small images."""
    return _framed(config, image_shape(config).tokens) * count


def _framed(config: Mapping[str, Any], tokens: int) -> list[int]:
    """Of one image, between the tokens that frame it where the config names such."""
    framed = [image_token(config)] * tokens
    if "vision_start_token_id" in config:
        framed = [config["vision_start_token_id"], *framed, config["vision_end_token_id"]]
    return framed


def _row(config: Mapping[str, Any], count: int, size: tuple[int, int] | None) -> tuple[list[int], Features]:
    """Ids and features of ``count`` equal images; none of them is black, which some models take for no image."""
    import numpy as np

    image = image_shape(config, size)
    axis = 1 if "pixel_attention_mask" in image.integers else 0  # Idefics3 counts a sample's images by it
    one = {name: np.ones(shape, dtype=np.float32) for name, shape in image.floats.items()}
    one |= {name: np.asarray(value, dtype=np.int64) for name, value in image.integers.items()}
    ids = _framed(config, image.tokens) * count
    return ids, {name: np.concatenate([array] * count, axis) for name, array in one.items() if count}


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
    media=Media("image", "AutoProcessor", "pixel_values", True, _features, _tokens, _row, check_images),
    validated=True,
    why_format="conversations with images",
)
