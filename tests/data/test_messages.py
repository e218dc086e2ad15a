"""Conversations as people have them become one form; what cannot is an error with file, row and key."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cases import every_case
from toolkit.data.fields import canonical_row
from toolkit.data.rows import Row
from toolkit.errors import InputError

CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
WITH_TOOL: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "18"},
    {"role": "assistant", "content": "18 degrees."},
]
NEEDED = {"messages": "messages"}


def read(value: dict[str, Any], unit: str = "line") -> dict[str, Any]:
    return canonical_row(Row(value, "x.jsonl", 3, unit), NEEDED)


def refused(value: dict[str, Any]) -> str:
    with pytest.raises(InputError) as caught:
        read(value)
    message = str(caught.value)
    assert message.startswith("x.jsonl:3: ")
    return message.removeprefix("x.jsonl:3: ")


def changed(index: int, **keys: Any) -> dict[str, Any]:
    return {"messages": [m | (keys if at == index else {}) for at, m in enumerate(WITH_TOOL)]}


def test_calls_as_objects_and_as_json_mean_the_same() -> None:
    as_text = CALL | {"function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    expected = read({"messages": WITH_TOOL})["messages"]
    assert expected[1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    for calls in ([as_text], json.dumps([as_text]), [json.dumps(as_text)]):
        assert read(changed(1, tool_calls=calls))["messages"] == expected
    flat = {"name": "weather", "arguments": {"city": "Paris"}}
    without_id = {key: part for key, part in CALL.items() if key != "id"}
    assert read(changed(1, tool_calls=[flat]))["messages"][1]["tool_calls"] == [without_id]
    earlier = changed(1, tool_calls=None, function_call={"name": "weather", "arguments": '{"city": "Paris"}'})
    assert read(earlier)["messages"][1]["tool_calls"] == [without_id]


def test_parquet_gives_every_object_the_keys_of_all() -> None:
    call = CALL | {"function": {"name": "weather", "arguments": {"city": "Paris", "day": None}}}
    value = {"messages": [m | {"tool_calls": m.get("tool_calls")} for m in changed(1, tool_calls=[call])["messages"]]}
    found = read(value, "row")["messages"]
    assert found[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Paris"}
    assert "tool_calls" not in found[0]
    # Of a line of JSON null is what somebody wrote.
    assert read(value)["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"city": "Paris", "day": None}


def test_tools_as_a_list_or_as_json() -> None:
    function = {"name": "weather", "description": "d", "parameters": {"type": "object", "properties": {}}}
    expected = [{"type": "function", "function": function}]
    for tools in (expected, json.dumps(expected), [function], [json.dumps(function)]):
        assert read({"messages": WITH_TOOL, "tools": tools})["tools"] == expected
    assert read({"messages": WITH_TOOL, "functions": [function]})["tools"] == expected
    assert read({"messages": WITH_TOOL, "tools": None})["tools"] is None


def test_parts_of_text_are_joined_and_reasoning_has_one_name() -> None:
    parts = [{"type": "text", "text": "18 "}, {"type": "text", "text": "degrees."}]
    for name in ("reasoning_content", "thinking", "reasoning"):
        last = read(changed(3, content=parts, **{name: "hot"}))["messages"][3]
        assert last == {"role": "assistant", "content": "18 degrees.", "reasoning_content": "hot"}


def test_sharegpt() -> None:
    turns = [
        {"from": "human", "value": "Weather?"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Paris"}}'},
        {"from": "observation", "value": "18"},
        {"from": "gpt", "value": "18 degrees."},
    ]
    found = read({"conversations": turns, "system": "Be brief.", "tools": "[]"})
    assert [m["role"] for m in found["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert found["messages"][2]["tool_calls"][0]["function"]["arguments"] == {"city": "Paris"}
    assert found["tools"] is None
    assert read({"messages": turns})["messages"] == found["messages"][1:]


def test_alpaca() -> None:
    value = {"instruction": "Translate.", "input": "chat", "output": "cat"}
    assert read(value)["messages"] == [
        {"role": "user", "content": "Translate.\n\nchat"},
        {"role": "assistant", "content": "cat"},
    ]


@every_case(
    ("value", "message"),
    [
        (changed(0, role="usr"), "messages[0].role: unknown role 'usr'; did you mean user?"),
        ({"conversations": [{"from": "humann", "value": "x"}]}, "conversations[0].from: unknown role 'humann'"),
        (changed(1, tool_calls=None, content="x"), "messages[2]: is a tool's result, and no assistant turn before"),
        (changed(2, tool_call_id="c9"), "messages[2].tool_call_id: 'c9' is none of the calls before it (c1)"),
        (changed(1, tool_calls=[{"function": {"name": "weather", "arguments": "{city}"}}]),
         "messages[1].tool_calls[0].function.arguments: is not JSON: Expecting"),
        (changed(1, tool_calls=[{"function": {"name": "weather", "arguments": "[1]"}}]),
         "messages[1].tool_calls[0].function.arguments: must be an object, not a list"),
        (changed(1, tool_calls=[{"function": {}}]), "messages[1].tool_calls[0].function.name: missing"),
        (changed(1, tool_calls=7), "messages[1].tool_calls: must be a list of calls, not 7"),
        (changed(0, tool_calls=[CALL]), "messages[0].tool_calls: only an assistant calls tools"),
        (changed(0, content=[{"type": "image", "image": "x"}]), "messages[0].content[0]: is of type image"),
        (changed(3, weight=2), "messages[3].weight: must be 0 (not learned) or 1, not 2"),
        ({"messages": WITH_TOOL, "tools": "{"}, "tools: is not JSON"),
        ({"messages": WITH_TOOL, "tools": [{"type": "function"}]}, "tools[0].function.name: missing"),
        ({"messages": WITH_TOOL, "chat_template_kwargs": "[]"}, "chat_template_kwargs: must be an object"),
        ({"instruction": "x", "output": " "}, "output: is empty"),
        ({"messages": [m | {"weight": 0} for m in WITH_TOOL]}, "messages: every assistant turn has weight 0"),
    ],
)  # fmt: skip
def test_what_is_no_conversation_is_an_error_at_the_row(value: dict[str, Any], message: str) -> None:
    assert refused(value).startswith(message)
