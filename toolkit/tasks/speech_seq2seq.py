"""Speech to text: an encoder reads a recording, a decoder writes its words."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from toolkit.tasks.base import Drawn, Encoded, Features, Format, Maker, Media, Task
from toolkit.tasks.labels import Labels


def _audio(maker: Maker, row: Any, fields: Mapping[str, Any]) -> Encoded:
    return [], maker.target(fields["text"])


def _features(config: Mapping[str, Any], draw: random.Random) -> Features:
    """``input_features``: float32 (1, mel bands, frames), as Whisper takes them: two frames for each position."""
    import numpy as np

    shape = (1, config["num_mel_bins"], 2 * config["max_source_positions"])
    return {"input_features": np.random.default_rng(draw.getrandbits(63)).standard_normal(shape, dtype=np.float32)}


def _draw(drawn: Drawn, tokens: list[int]) -> list[int]:
    return drawn.draw.choices(drawn.ids, k=drawn.draw.randint(2, drawn.longest))


TASK = Task(
    name="speech-seq2seq",
    auto_class="AutoModelForSpeechSeq2Seq",
    peft_type=None,
    pipeline="automatic-speech-recognition",
    labels=Labels.TARGET,
    formats={"audio": Format(("audio", "text"), _audio, media="audio")},
    draw=_draw,
    media=Media("audio", "AutoProcessor", "input_features", False, _features),
    validated=True,
    why_format="a recording in the field audio and its words in the field text",
)
