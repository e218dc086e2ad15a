"""Classifiers of whole texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.tasks.base import Drawn, Encoded, Format, Maker, Task
from toolkit.tasks.labels import Labels


def _text(maker: Maker, row: Any, fields: Mapping[str, Any]) -> Encoded:
    return maker.ending(maker.encode(fields["text"])), maker.label(row, fields["label"])


def _draw(drawn: Drawn, tokens: list[int]) -> int:
    return drawn.draw.randrange(drawn.classes)


TASK = Task(
    name="sequence-classification",
    auto_class="AutoModelForSequenceClassification",
    peft_type="SEQ_CLS",
    pipeline="text-classification",
    labels=Labels.SAMPLE,
    formats={"text": Format(("text", "label"), _text)},
    draw=_draw,
    classes=True,
    why_format="text with the field label",
)
