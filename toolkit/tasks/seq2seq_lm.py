"""Sequence-to-sequence models: an encoder reads the prompt, a decoder writes the completion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.tasks.base import Drawn, Encoded, Format, Maker, Task
from toolkit.tasks.labels import Labels


def _pair(maker: Maker, row: Any, fields: Mapping[str, Any]) -> Encoded:
    prompt = maker.encode(fields["prompt"])
    target = maker.once(list(maker.tokenizer(text_target=fields["completion"], verbose=False)["input_ids"]))
    return maker.ending(prompt), maker.ending(target)


def _draw(drawn: Drawn, tokens: list[int]) -> list[int]:
    return drawn.draw.choices(drawn.ids, k=drawn.draw.randint(2, drawn.longest))


TASK = Task(
    name="seq2seq-lm",
    auto_class="AutoModelForSeq2SeqLM",
    peft_type="SEQ_2_SEQ_LM",
    pipeline="text2text-generation",
    labels=Labels.TARGET,
    formats={"prompt-completion": Format(("prompt", "completion"), _pair)},
    draw=_draw,
    validated=True,
    why_format="the prompt goes to the encoder",
)
