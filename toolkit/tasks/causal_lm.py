"""Causal language models: each token predicts the next one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.tasks.base import Drawn, Encoded, Format, Maker, Task
from toolkit.tasks.labels import IGNORED, Labels


def _text(maker: Maker, row: Any, fields: Mapping[str, Any]) -> Encoded:
    ids = maker.ending(maker.encode(fields["text"]))
    return ids, list(ids)


def _prompt_completion(maker: Maker, row: Any, fields: Mapping[str, Any]) -> Encoded:
    ids, start = maker.pair(fields["prompt"], fields["completion"])
    ids = maker.ending(ids)
    return ids, [IGNORED] * start + ids[start:]


def _messages(maker: Maker, row: Any, fields: Mapping[str, Any]) -> Encoded:
    piece = fields["piece"]
    return supervised_turns(maker, piece, *maker.chat.encode(row, piece))


def supervised_turns(maker: Maker, piece: Any, ids: list[int], supervised: list[bool]) -> Encoded:
    """A sample of a conversation's tokens, ended; labels where ``supervised``."""
    if not maker.ended(ids, maker.chat.is_blank):
        # Whoever spoke last ends the sample; only an assistant is taught to.
        ids = [*ids, maker.tokenizer.eos_token_id]
        supervised = [*supervised, piece.ends]
    return ids, [token if on else IGNORED for token, on in zip(ids, supervised, strict=True)]


def _draw(drawn: Drawn, tokens: list[int]) -> list[int]:
    labels, draw = list(tokens), drawn.draw
    if drawn.form == "text":
        return labels
    # The prompt, and between turns of a conversation what others say, carries no loss.
    hidden = range(draw.randint(1, len(tokens) // 2))
    for at in hidden:
        labels[at] = IGNORED
    if drawn.form == "messages" and len(tokens) > 8:
        middle = draw.randint(len(hidden), len(tokens) - 3)
        labels[middle : middle + 2] = [IGNORED, IGNORED]
    return labels


TASK = Task(
    name="causal-lm",
    auto_class="AutoModelForCausalLM",
    peft_type="CAUSAL_LM",
    pipeline="text-generation",
    labels=Labels.NEXT,
    formats={
        "text": Format(("text",), _text),
        "prompt-completion": Format(("prompt", "completion"), _prompt_completion),
        "messages": Format(("messages",), _messages),
    },
    draw=_draw,
    validated=True,
    packs=True,
)
