"""Random images within random texts, for models that see."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from toolkit.data.formats import Example
from toolkit.data.media import kinds_of_config, token_kinds, with_defaults
from toolkit.tasks.base import Task
from toolkit.tasks.labels import IGNORED

_SPECIAL = ("_token_id", "_token_index")


class SampleImages:
    """Puts images of a shape that a model of ``config`` takes into samples of text."""

    def __init__(self, task: Task, config: Mapping[str, Any]) -> None:
        assert task.media is not None
        assert task.media.in_text is not None
        import transformers

        config = with_defaults(config)
        self._media, self._in_text, self._config = task.media, task.media.in_text, config
        self.reserved = [value for key, value in config.items() if key.endswith(_SPECIAL) and isinstance(value, int)]
        framed = self._in_text(config, 1)
        self._image = max(set(framed), key=framed.count)
        self._kinds = kinds_of_config(task, transformers.AutoConfig.for_model(**config))

    def among(self, example: Example, draw: random.Random, first: bool) -> Example:
        """``example`` with no image, one or two in its text; the ``first`` sample has one. None of their tokens has a
        label."""
        count = 1 if first else draw.choice([0, 1, 1, 2])
        drawn = [self._media.draw(self._config, draw) for _ in range(count)]
        framed = self._in_text(self._config, 1)
        ids, labels = list(example.input_ids), list(example.labels)  # type: ignore[arg-type]
        for _ in range(count):
            at = draw.randrange(len(example.input_ids) // 2)
            while at and ids[at] in framed:
                at -= 1
            ids[at:at], labels[at:at] = framed, [IGNORED] * len(framed)
        axis = 1 if drawn and "pixel_attention_mask" in drawn[0] else 0  # Idefics3 counts a sample's images by it
        features = {name: np.concatenate([one[name] for one in drawn], axis) for name in (drawn[0] if drawn else ())}
        return replace(
            example, input_ids=ids, labels=labels, features=features | token_kinds(self._kinds, [self._image], ids)
        )
