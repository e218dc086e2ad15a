"""Masked language models: hidden tokens are predicted from both sides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.tasks.base import Drawn, Encoded, Format, Maker, Task
from toolkit.tasks.labels import IGNORED, Labels


def _text(maker: Maker, row: Any, fields: Mapping[str, Any]) -> Encoded:
    """Labels are the ids that may be hidden; which are is drawn as a micro-batch is made."""
    ids = maker.ending(maker.encode(fields["text"]))
    special = set(maker.tokenizer.all_special_ids)
    return ids, [IGNORED if token in special else token for token in ids]


def _draw(drawn: Drawn, tokens: list[int]) -> list[int]:
    return [IGNORED, *tokens[1:-1], IGNORED]


TASK = Task(
    name="masked-lm",
    auto_class="AutoModelForMaskedLM",
    peft_type=None,
    pipeline="fill-mask",
    labels=Labels.TOKEN,
    formats={"text": Format(("text",), _text)},
    draw=_draw,
    masks=True,
    why_format="its tokens are hidden at random",
)
