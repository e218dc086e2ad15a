"""Classifiers of images."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from toolkit.tasks.base import Drawn, Encoded, Features, Format, Maker, Media, Task
from toolkit.tasks.labels import Labels

_USUAL_SIDE = 224
"""Pixels of a side where the config names none: convolutional models take any size, and were trained with this one."""


def _image(maker: Maker, row: Any, fields: Mapping[str, Any]) -> Encoded:
    return [], maker.label(row, fields["label"])


def _features(config: Mapping[str, Any], draw: random.Random) -> Features:
    """``pixel_values``: float32 (1, channels, height, width)."""
    import numpy as np

    side = config.get("image_size") or _USUAL_SIDE
    height, width = side if isinstance(side, list | tuple) else (side, side)
    shape = (1, config.get("num_channels") or 3, height, width)
    return {"pixel_values": np.random.default_rng(draw.getrandbits(63)).standard_normal(shape, dtype=np.float32)}


def _draw(drawn: Drawn, tokens: list[int]) -> int:
    return drawn.draw.randrange(drawn.classes)


TASK = Task(
    name="image-classification",
    auto_class="AutoModelForImageClassification",
    peft_type=None,
    pipeline="image-classification",
    labels=Labels.SAMPLE,
    formats={"image": Format(("image", "label"), _image, media="image")},
    draw=_draw,
    classes=True,
    media=Media("image", "AutoImageProcessor", "pixel_values", False, _features),
    validated=True,
    heads=("classifier",),
    why_format="an image in the field image and its class in the field label",
)
