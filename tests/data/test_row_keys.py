"""Keys of rows and of messages: each is read, refused by name, or listed as not read with its number of rows."""

from __future__ import annotations

from typing import Any

import pytest

from cases import every_case
from toolkit.data.fields import canonical_row
from toolkit.data.rows import Row
from toolkit.data.unread import Unread
from toolkit.errors import InputError

NEEDED = {"messages": "messages"}
ASK, SAY = {"role": "user", "content": "which colour"}, {"role": "assistant", "content": "yellow"}
AGAIN, END = {"role": "user", "content": "and the door"}, {"role": "assistant", "content": "blue"}
SYSTEM = {"role": "system", "content": "answer in blue"}
OTHER = {"system": "system", "history": "history"}


def read(value: dict[str, Any], optional: dict[str, str] | None = None) -> list[dict[str, Any]]:
    return canonical_row(Row(value, "x.jsonl", 3), NEEDED, optional)["messages"]  # type: ignore[no-any-return]


def refused(value: dict[str, Any]) -> str:
    with pytest.raises(InputError) as caught:
        read(value)
    return str(caught.value).removeprefix("x.jsonl:3: ")


def unread(*values: dict[str, Any], needed: dict[str, str] = NEEDED) -> dict[str, int]:
    found = Unread(needed, {"tools": "tools", "system": "system", "history": "history"} if needed is NEEDED else {})
    for value in values:
        found.add(Row(value, "x.jsonl", 3))
    return {one["name"]: one["rows"] for one in found.to_json()}


@every_case(
    ("key", "value"),
    [
        ("weight", 0), ("weight", 0.0), ("loss", False), ("train", False), ("training", False), ("trainable", False),
        ("loss_mask", 0), ("train_on_turn", False), ("masked", True), ("masked", 1), ("loss", 0), ("train", "false"),
    ],
)  # fmt: skip
def test_a_turn_that_is_marked_as_not_learned_has_weight_0(key: str, value: Any) -> None:
    found = read({"messages": [ASK, SAY | {key: value}, AGAIN, END]})
    assert found == [ASK, SAY | {"weight": 0}, AGAIN, END]
    learned = "true" if value == "false" else not value
    assert read({"messages": [ASK, SAY | {key: learned}, AGAIN, END]})[1] == SAY | {"weight": 1}
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", key: value}]
    assert "not learned" in refused({"conversations": turns})


def test_marks_that_mean_nothing_or_contradict_each_other_are_refused() -> None:
    assert refused({"messages": [ASK, SAY | {"mask": 1}]}).startswith("messages[1].mask: ")
    assert refused({"messages": [ASK, SAY | {"loss": 0.5}]}).startswith("messages[1].loss: ")
    assert refused({"messages": [ASK, SAY | {"weight": 2}]}).startswith("messages[1].weight: ")
    assert refused({"messages": [ASK, SAY | {"weight": 1, "loss": False}]}).startswith("messages[1].loss: ")
    # Of a parquet file with the keys of all: null is no mark.
    assert read({"messages": [ASK, SAY | {"mask": None, "loss": None}]}) == [ASK, SAY]


@pytest.mark.parametrize("name", ["system", "system_prompt"])
def test_a_system_column_is_a_system_turn(name: str) -> None:
    text = "answer in blue"
    assert read({name: text, "messages": [ASK, SAY]}) == [SYSTEM, ASK, SAY]
    assert read({name: [{"type": "text", "text": text}], "messages": [ASK, SAY]}) == [SYSTEM, ASK, SAY]
    turns = [{"from": "human", "value": "which colour"}, {"from": "gpt", "value": "yellow"}]
    assert read({name: text, "conversations": turns}) == [SYSTEM, ASK, SAY]
    assert read({name: text, "instruction": "which colour", "output": "yellow"}) == [SYSTEM, ASK, SAY]
    assert read({name: text, "prompt": [ASK], "completion": [SAY]})[0] == SYSTEM
    assert read({name: " ", "messages": [ASK, SAY]}) == [ASK, SAY]
    assert read({"sys": text, "messages": [ASK, SAY]}, OTHER | {"system": "sys"}) == [SYSTEM, ASK, SAY]
    # The same turn twice is one; two others are a contradiction.
    assert read({name: text, "messages": [SYSTEM, ASK, SAY]}) == [SYSTEM, ASK, SAY]
    assert refused({name: text, "messages": [SYSTEM | {"content": "red"}, ASK, SAY]}).startswith(f"{name}: ")
    assert refused({name: 3, "messages": [ASK, SAY]}).startswith(f"{name}: ")


def test_history_of_alpaca_is_the_turns_before() -> None:
    row = {"instruction": "and the door", "output": "blue", "history": [["which colour", "yellow"]]}
    assert read(row) == [ASK, SAY, AGAIN, END]
    assert read(row | {"system": "answer in blue"}) == [SYSTEM, ASK, SAY, AGAIN, END]
    mapped = {"instruction": "and the door", "output": "blue", "past": row["history"]}
    assert read(mapped, OTHER | {"history": "past"}) == [ASK, SAY, AGAIN, END]
    assert read(row | {"history": []}) == [AGAIN, END]
    assert read(row | {"history": None}) == [AGAIN, END]
    for wrong in ("text", [["one"]], [["a", 3]], [{"a": 1}]):
        assert refused(row | {"history": wrong}).startswith("history")


def test_prompt_and_completion_as_lists_of_messages() -> None:
    row = {"prompt": [ASK, SAY, AGAIN], "completion": [END]}
    expected = [ASK, SAY | {"weight": 0}, AGAIN, END]
    assert read(row) == expected
    found = canonical_row(Row(row, "x.jsonl", 3), {"prompt": "prompt", "completion": "completion"})
    assert found["messages"] == expected
    assert "completion" in refused({"prompt": [ASK], "completion": [AGAIN]})
    assert refused({"prompt": [ASK], "completion": "yellow"}).startswith("completion: ")
    assert refused({"prompt": "which colour", "completion": [SAY]}).startswith("prompt: ")


def test_what_is_not_read_is_counted_by_name() -> None:
    row = {"messages": [ASK, SAY], "id": "7", "source": "s", "tools": None, "chosen": "", "images": []}
    assert unread(row, row | {"id": None}, row) == {"source": 3, "id": 2}
    assert unread({"messages": [ASK | {"timestamp": 3}, SAY | {"score": 1}]}) == {
        "messages[].timestamp": 1,
        "messages[].score": 1,
    }
    assert unread({"conversations": [{"from": "human", "value": "a", "lang": "en"}]}) == {"conversations[].lang": 1}
    assert unread({"messages": [ASK, SAY], "prompt": "which colour"}) == {"prompt": 1}
    assert unread({"messages": [ASK, SAY], "system": "a", "system_prompt": "b"}) == {"system_prompt": 1}
    assert unread({"messages": [ASK, SAY], "history": [["a", "b"]]}) == {"history": 1}
    assert unread({"instruction": "a", "output": "b", "history": [["a", "b"]], "text": "a b"}) == {"text": 1}
    assert unread({"text": "a", "system": "b"}, needed={"text": "text"}) == {"system": 1}
    pair = {"prompt": "prompt", "completion": "completion"}
    assert unread({"prompt": "a", "completion": "b", "reasoning": "c"}, needed=pair) == {"reasoning": 1}
    assert unread({"text": "a", "label": 1, "text_pair": "c"}, needed={"text": "text", "label": "label"}) == {
        "text_pair": 1
    }


def test_a_key_that_the_template_reads_is_read() -> None:
    found = Unread(NEEDED, {}, template="{{ message.content }}{{ message['timestamp'] }}{{ message.partial }}")
    found.add(Row({"messages": [ASK | {"timestamp": 3, "time": 1, "partial": True}]}, "x", 1))
    assert [one["name"] for one in found.to_json()] == ["messages[].time"]


@every_case(
    ("name", "value", "said"),
    [
        ("chosen", "a", "preference"), ("rejected", "a", "preference"), ("label", True, "preference"),
        ("images", ["a.png"], "image-text-to-text"), ("weight", 0.5, "each row counts"), ("loss", False, "row"),
        ("history", [["a", "b"]], "messages"), ("reasoning", "because", "reasoning_content"),
    ],
)  # fmt: skip
def test_a_column_that_people_take_to_be_read_says_why_it_is_not(name: str, value: Any, said: str) -> None:
    found = Unread(NEEDED, {"tools": "tools"})
    found.add(Row({"messages": [ASK, SAY], name: value}, "x", 1))
    [one] = found.to_json()
    assert one["name"] == name
    assert said in one["why"]
    assert name in found.notes("data.train")[0]
