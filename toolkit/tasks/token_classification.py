"""Classifiers of words: names, parts of speech."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.tasks.base import Drawn, Encoded, Format, Maker, Task
from toolkit.tasks.labels import IGNORED, Labels


def _tokens(maker: Maker, row: Any, fields: Mapping[str, Any]) -> Encoded:
    """A word's first token has its label; the rest of it, and special tokens, have none."""
    ids, words = maker.words(row, fields["tokens"])
    labels, before = [], None
    for word in words:
        first = word is not None and word != before
        labels.append(maker.label(row, fields["labels"][word]) if first else IGNORED)
        before = word
    ended = maker.ending(ids)
    return ended, labels + [IGNORED] * (len(ended) - len(ids))


def _draw(drawn: Drawn, tokens: list[int]) -> list[int]:
    labels = [drawn.draw.randrange(drawn.classes) for _ in tokens]
    # Special tokens at both ends, and the later tokens of a word.
    for at in (0, len(tokens) - 1, *drawn.draw.sample(range(len(tokens)), len(tokens) // 4)):
        labels[at] = IGNORED
    labels[1] = drawn.draw.randrange(drawn.classes)
    return labels


TASK = Task(
    name="token-classification",
    auto_class="AutoModelForTokenClassification",
    peft_type="TOKEN_CLS",
    pipeline="token-classification",
    labels=Labels.TOKEN,
    formats={"tokens": Format(("tokens", "labels"), _tokens)},
    draw=_draw,
    classes=True,
    heads=("classifier", "score"),
    why_format="words in the field tokens and as many labels in the field labels",
)
