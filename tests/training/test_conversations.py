"""Conversations in three layouts, mixed, packed and trained; resumed in the middle of the mixture."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch

from jobs import Run, plain_run, resolved_from, train_job, worst
from tiny import recipe_dict
from toolkit.data.loader import open_data
from toolkit.launch.group import WorkerGroup
from toolkit.model.processor import load_tokenizer
from toolkit.recipe.schema import Recipe
from toolkit.training.finding import newest
from toolkit.verification.run import verify

EXAMPLE = Path(__file__).parents[2] / "examples" / "tool_calling"
# ChatML with tools, as Qwen2.5 writes it.
TEMPLATE = """
{%- if tools %}<|im_start|>system
Tools: {% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def rows(count: int, seed: int) -> Iterator[dict[str, Any]]:
    found: Iterator[dict[str, Any]] = runpy.run_path(str(EXAMPLE / "make_data.py"))["rows"](count, seed)
    return found


def sharegpt(row: dict[str, Any]) -> dict[str, Any]:
    """The same conversation as ShareGPT writes it."""
    turns = []
    for message in row["messages"][1:]:
        if calls := message.get("tool_calls"):
            function = calls[0]["function"]
            value = {"name": function["name"], "arguments": json.loads(function["arguments"])}
            turns.append({"from": "function_call", "value": json.dumps(value)})
        else:
            said = {"user": "human", "assistant": "gpt", "tool": "observation"}[message["role"]]
            turns.append({"from": said, "value": message["content"]})
    return {"conversations": turns, "system": row["messages"][0]["content"], "tools": json.dumps(row["tools"])}


def write(folder: Path, count: int) -> list[dict[str, Any]]:
    """OpenAI's JSONL, ShareGPT's JSONL and Parquet of nested messages, ``count`` rows each, as sources of a recipe."""
    openai, shared, nested = folder / "openai.jsonl", folder / "sharegpt.jsonl", folder / "nested.parquet"
    openai.write_text("".join(json.dumps(row) + "\n" for row in rows(count, 0)))
    shared.write_text("".join(json.dumps(sharegpt(row)) + "\n" for row in rows(count, 1)))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows(count, 2))), nested)
    return [
        {"path": str(openai), "proportion": 0.5},
        {"path": str(shared), "proportion": 0.3},
        {"path": str(nested), "proportion": 0.2},
    ]


def recipe(root: Path, folder: Path, count: int, strategy: str, **run: Any) -> dict[str, Any]:
    (folder / "chat.jinja").write_text(TEMPLATE)
    data = {"train": write(folder, count), "format": "messages", "chat_template": str(folder / "chat.jinja"),
            "packing": True, "max_length": 2048, "cache": str(folder / "cache")}  # fmt: skip
    return recipe_dict(root, data=data, strategy={"name": strategy}, batch={"micro_size": 1, "accumulation": 2},
                       run={"max_steps": 6, **run})  # fmt: skip


def test_three_layouts_of_one_conversation_are_one_sample(tiny_root: Path, tmp_path: Path) -> None:
    found = []
    for source in recipe(tiny_root, tmp_path, 5, "single")["data"]["train"]:
        row = next(rows(1, 0))
        match Path(source["path"]).name:
            case "openai.jsonl":
                Path(source["path"]).write_text(json.dumps(row) + "\n")
            case "sharegpt.jsonl":
                Path(source["path"]).write_text(json.dumps(sharegpt(row)) + "\n")
            case _:
                pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), source["path"])
        one = recipe_dict(tiny_root, data={"train": source["path"], "format": "messages", "max_length": 4096,
                                           "chat_template": str(tmp_path / "chat.jinja")})  # fmt: skip
        parsed = Recipe.model_validate(one)
        found.append(open_data(parsed, "train", load_tokenizer(parsed))[0])
    # ShareGPT has no names and ids of calls, which this template does not write.
    assert found[0] == found[1] == found[2]
    assert any(label != -100 for label in found[0].labels)


@pytest.mark.parametrize("strategy", [pytest.param("zero2", marks=pytest.mark.nightly), "fsdp2"])
def test_a_mixture_trains_as_the_plain_loop_and_resumes_bit_for_bit(
    strategy: str, tiny_root: Path, group: WorkerGroup, tmp_path: Path
) -> None:
    _train_and_resume(strategy, tiny_root, group, tmp_path, 40)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("strategy", ["zero2", "fsdp2"])
def test_twenty_thousand_rows_of_each_layout(
    strategy: str, tiny_root: Path, group: WorkerGroup, tmp_path: Path
) -> None:
    resolved = resolved_from(_train_and_resume(strategy, tiny_root, group, tmp_path, 20_000))
    assert verify(resolved, group=group, time_limit=240).verdict == "equivalent"


def _train_and_resume(strategy: str, root: Path, group: WorkerGroup, folder: Path, count: int) -> dict[str, Any]:
    values = recipe(root, folder, count, strategy)
    resolved = resolved_from(values)
    samples = open_data(resolved.recipe, "train", load_tokenizer(resolved.recipe))
    assert len(samples) == 2 * count
    whole: Run = group.run(train_job, resolved, 6, None, None, 6, timeout=900)[0]
    expected = plain_run(resolved, 6)
    assert whole.tokens == expected.tokens
    assert whole.losses == pytest.approx(expected.losses, rel=1e-5)
    assert worst(whole.weights, expected.weights)[0] < 1e-4
    group.run(train_job, resolved, 3, str(folder / "checkpoints"), None, 6, timeout=900)
    resumed: Run = group.run(train_job, resolved, 3, None, str(newest(folder / "checkpoints")), 6, timeout=900)[0]
    assert resumed.losses == whole.losses[3:]
    assert all(torch.equal(resumed.weights[name], weight) for name, weight in whole.weights.items())
    return values


def test_the_example_is_read(tiny_root: Path, tmp_path: Path) -> None:
    """The recipe that users copy: its own data, with a tokenizer that is here."""
    import yaml

    values = yaml.safe_load((EXAMPLE / "recipe.yaml").read_text())
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in islice(rows(30, 0), 30)))
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    tiny = recipe_dict(tiny_root)
    values |= {"model": tiny["model"], "tokenizer": tiny["tokenizer"]}
    values["data"] |= {"train": str(tmp_path / "train.jsonl"), "eval": None, "max_length": 4096,
                       "chat_template": str(tmp_path / "chat.jinja")}  # fmt: skip
    parsed = Recipe.model_validate(values)
    samples = open_data(parsed, "train", load_tokenizer(parsed))
    assert len(samples) == 30
    assert not any(samples[index].cut for index in range(30))
