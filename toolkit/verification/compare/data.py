"""Data: which tokens of conversations are supervised, and what an epoch of several sources holds, by the definition."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

from toolkit.data.fields import canonical_row
from toolkit.data.rows import Row
from toolkit.data.template_dialect import Dialect
from toolkit.reference.conversation import Turn, check, epoch_counts, stretches
from toolkit.verification.cases.conversations import ROWS, DataCase, tokenizer_of
from toolkit.verification.compare.measure import Measure, Stage
from toolkit.verification.record.samples import DataTrace

KINDS = ("header", "unended", "shown", "elsewhere", "beyond", "missing", "repeated")
"""Of ``Findings``, each a kind of measure; in the order in which one explains the next."""


_THINKING: tuple[dict[str, Any], ...] = ({}, {"enable_thinking": True})


def data_stage(case: DataCase, trace: DataTrace) -> Stage:
    """Every conversation's supervised stretches, and each source's samples in an epoch."""
    stage = Stage("data", detection_limit=1.0)
    if case.conversations:
        _conversations(case, trace, stage)
    for part, drawn in enumerate(trace.drawn):
        size = case.sizes[part]
        least, most = epoch_counts(case.sizes, *zip(*case.shares, strict=True))[part]
        facts = {"source": part, "seen": len(drawn), "least": least, "most": most}
        off = max(least - len(drawn), len(drawn) - most, 0)
        stage.measures.append(Measure("mixture-share", 0, off, 0.0, facts=facts))
        # Without replacement no sample occurs twice more often than another.
        draws = Counter(drawn)
        spread = max(draws.values(), default=0) - (min(draws.values(), default=0) if len(draws) == size else 0)
        stage.measures.append(
            Measure("mixture-draws", 0, max(0, spread - 1), 0.0, facts={"source": part, "spread": spread})
        )
    several = f", {len(trace.drawn)} sources" if trace.drawn else ""
    stage.summary = f"{len(trace.samples)} conversations{several}" if case.conversations else f"{several[2:]}"
    return stage


def _conversations(case: DataCase, trace: DataTrace, stage: Stage) -> None:
    tokenizer = tokenizer_of(case.recipe)
    for number, value in enumerate(ROWS):
        mine = [sample for sample in trace.samples if sample.row == number]
        if not mine:
            continue
        turns = _turns(case, tokenizer, value)
        samples = []
        for sample in mine:
            encoded = tokenizer(sample.text, add_special_tokens=False, return_offsets_mapping=True)
            count = len(encoded["input_ids"])
            same = list(encoded["input_ids"]) == sample.ids[:count]
            stage.measures.append(Measure("conversation-ids", 0, float(not same), 0.0, facts={"row": number + 1}))
            supervised = [label != -100 for label in sample.labels[:count]]
            samples.append((sample.text, stretches(encoded["offset_mapping"], supervised)))
        others = [str(m["content"]) for m in value["messages"] if m["role"] != "assistant"]
        found = check(samples, turns, others)
        for kind in KINDS:
            facts = {"row": number + 1, "count": getattr(found, kind)}
            stage.measures.append(Measure(f"conversation-{kind}", 0, getattr(found, kind), 0.0, facts=facts))


def _turns(case: DataCase, tokenizer: Any, value: dict[str, Any]) -> list[Turn]:
    """The turns that the recipe learns, with what its template shows and writes."""
    data = case.recipe["data"]
    template = _template(data, tokenizer)
    fields = canonical_row(Row(value, "built-in", 1), {"messages": "messages"})
    messages, options = fields["messages"], dict(data["chat_template_kwargs"])
    if fields["tools"]:
        options["tools"] = fields["tools"]

    def render(some: list[dict[str, Any]], **more: Any) -> str:
        text: str = tokenizer.apply_chat_template(some, chat_template=template, tokenize=False, **(options | more))
        return text

    dialect = Dialect(template, render)
    assistants = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    learned = assistants[-1:] if data["turns"] == "last" else assistants
    found = []
    for index in learned:
        before = [
            dialect.call(partial(render, add_generation_prompt=True, **more), messages[:index]) for more in _THINKING
        ]
        prompts = tuple(dict.fromkeys([*before, *(prompt + dialect.header for prompt in before)]))
        text = dialect.call(render, messages[: index + 1])
        words = tuple(word for key, word in dialect.texts(messages[index]) if word and "name" not in key)
        found.append(Turn(index, prompts, text, words))
    return found


def _template(data: dict[str, Any], tokenizer: Any) -> str:
    if data["chat_template"] is None:
        text: str = tokenizer.get_chat_template()
        return text
    from toolkit.data.preflight import read_template

    return read_template(data["chat_template"])
