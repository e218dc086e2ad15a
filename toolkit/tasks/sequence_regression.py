"""Models that give a number for a whole text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.tasks.base import Drawn, Encoded, Format, Maker, Task
from toolkit.tasks.labels import Labels, number_bits


def _text(maker: Maker, row: Any, fields: Mapping[str, Any]) -> Encoded:
    return maker.ending(maker.encode(fields["text"])), number_bits(fields["number"])


def _draw(drawn: Drawn, tokens: list[int]) -> int:
    return number_bits(drawn.draw.gauss(0.0, 1.0))


TASK = Task(
    name="sequence-regression",
    auto_class="AutoModelForSequenceClassification",
    peft_type="SEQ_CLS",
    pipeline="text-classification",
    labels=Labels.SAMPLE,
    formats={"text": Format(("text", "number"), _text)},
    draw=_draw,
    numbers=True,
    why_format="text with a number in the field label",
)
