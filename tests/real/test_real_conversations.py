"""What the assistant learns of a conversation, under a pretrained model's own chat template."""

from __future__ import annotations

import json
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest

from jobs import loader_for, plain_run, resolved_from

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


def two_turns(recipe: dict[str, Any], data: Path) -> dict[str, Any]:
    return recipe | {
        "data": recipe["data"] | {"train": str(data / "two-turns.jsonl")},
        "strategy": {"name": "single"},
        "machine": {"device": "cpu", "processes": 1},
        "run": recipe["run"] | {"max_steps": 1},
    }


def test_both_turns_of_the_assistant_are_learned_and_nothing_else(
    recipe: dict[str, Any], model: str, data: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [json.loads(line)["messages"] for line in (data / "two-turns.jsonl").read_text("utf-8").splitlines()]
    expected = {
        tuple(f"{turn['content']}<|im_end|>" for turn in messages if turn["role"] == "assistant") for messages in rows
    }
    learned = set()
    epoch = islice(loader_for(resolved_from(two_turns(recipe, data)), 0), len(rows) // 2)  # windows of two
    for micro in chain.from_iterable(epoch):
        for ids, labels in zip(micro.tensors["input_ids"], micro.tensors["labels"], strict=True):
            learned.add(tuple(stretches(tokenizer, ids.tolist(), labels.tolist())))
    assert learned == expected


def stretches(tokenizer: Any, ids: list[int], labels: list[int]) -> list[str]:
    """The texts of neighbouring tokens that have a label."""
    texts: list[list[int]] = [[]]
    for token, label in zip(ids, labels, strict=True):
        if label >= 0:
            assert token == label
            texts[-1].append(token)
        elif texts[-1]:
            texts.append([])
    return [tokenizer.decode(text) for text in texts if text]


def test_the_first_loss_is_that_of_plain_transformers(recipe: dict[str, Any], model: str, data: Path) -> None:
    """The mean over the assistant's tokens of the first window, computed from the texts alone."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    resolved = resolved_from(two_turns(recipe, data))
    tokenizer, base = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model).eval()
    total, count = 0.0, 0
    for micro in next(iter(loader_for(resolved, 0))):
        text = tokenizer.decode(micro.tensors["input_ids"][0][micro.tensors["attention_mask"][0].bool()])
        ids = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        starts = [at for at, _ in ids.offset_mapping]
        with torch.no_grad():
            logits = base(input_ids=torch.tensor([ids.input_ids])).logits[0].log_softmax(-1)
        head = "<|im_start|>assistant\n"
        begin = text.find(head)
        while begin >= 0:
            begin += len(head)
            end = text.find("<|im_end|>", begin)
            for at in range(len(starts)):
                if begin <= starts[at] <= end:
                    total -= logits[at - 1, ids.input_ids[at]].item()
                    count += 1
            begin = text.find(head, end)
    assert plain_run(resolved, 1).losses[0] == pytest.approx(total / count, rel=1e-5)
