"""Conversations as people have them, in one form: OpenAI's messages with tools, ShareGPT, Alpaca, TRL's prompt and
completion.

The form is that of transformers' chat templates: ``role``, ``content`` (a string), ``reasoning_content``,
``tool_calls`` (``{type, id, function: {name, arguments}}``, arguments as an object), ``tool_call_id``, ``name``.
Standard library only: data is checked before anything heavy is imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from toolkit.data.images import MARK, image_of_part
from toolkit.data.rows import Row
from toolkit.data.text import check_text, kind_of
from toolkit.data.turn_marks import with_weight
from toolkit.recipe.load import did_you_mean

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation")
RESULTS = ("tool", "function", "ipython", "observation")
"""Roles of what a tool answered."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names that people and templates give to an assistant's reasoning; the first is ours."""
_SHAREGPT = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "model": "assistant", "bot": "assistant", "system": "system", "tool": "tool", "observation": "tool",
    "function_response": "tool", "function_call": "assistant", "tool_call": "assistant",
}  # fmt: skip
_CALLS = ("function_call", "tool_call")
_IMAGES = ("image", "image_url")
_TAKES = {False: "this task takes text alone", True: "this task takes text and images"}
_OTHER_KINDS = ("image", "image_url", "video", "audio", "input_audio", "file")


_SYSTEM = ("system", "system_prompt")
"""Names of a column that is the system turn; the first can be mapped by ``data.fields``."""
_EXPLAINED = {
    "ShareGPT": "conversations with from and value (ShareGPT) are read as messages with role and content",
    "Alpaca": "instruction, input and output (Alpaca) are read as one user turn and the assistant's answer",
    "TRL": "prompt and completion are lists of messages (TRL): they are read as one conversation, of which the "
    "completion's turns are learned",
}


def recognised(value: Mapping[str, Any], own: str, names: Mapping[str, str] = {}) -> str:
    """What a row without the field ``own`` holds instead: ``ShareGPT``, ``TRL``, ``Alpaca`` or an empty string.
    ``names``: the data's own names of further columns."""
    if own in value:
        return ""
    if isinstance(value.get("conversations"), list):
        return "ShareGPT"
    if is_pair(value, names.get("prompt", "prompt"), names.get("completion", "completion")):
        return "TRL"
    return "Alpaca" if isinstance(value.get("instruction"), str) and isinstance(value.get("output"), str) else ""


def is_pair(value: Mapping[str, Any], prompt: str, completion: str) -> bool:
    """Whether a row has a prompt and a completion that are lists of messages, or one of them is."""
    return (
        prompt in value and completion in value and any(isinstance(value[name], list) for name in (prompt, completion))
    )


def system_column(value: Mapping[str, Any], names: Mapping[str, str] = {}) -> str | None:
    """The column of a row that is its system turn; None if it has none."""
    given = (names.get("system", _SYSTEM[0]), *_SYSTEM[1:])
    return next((name for name in given if value.get(name) is not None and str(value[name]).strip()), None)


def explained(value: Mapping[str, Any], own: str, names: Mapping[str, str] = {}) -> list[str]:
    """How a row is read that is not simply messages: a line for each thing."""
    notes = [_EXPLAINED[kind]] if (kind := recognised(value, own, names)) else []
    if (name := system_column(value, names)) is not None:
        notes.append(f"{name} is read as the system turn of each conversation")
    if kind == "Alpaca" and value.get(past := names.get("history", "history")):
        notes.append(f"{past} is read as the turns before instruction; they are learned as the last is")
    return notes


def conversation(row: Row, own: str, images: bool = False, names: Mapping[str, str] = {}) -> list[dict[str, Any]]:
    """The messages of ``row``, checked; raises InputError at the row for what cannot be a conversation. ``images``:
    messages may have them; the content then has a mark for each, and ``images`` of a message lists them. ``names``: the
    data's own names of columns beside the messages."""
    kind = recognised(row.value, own, names)
    if kind == "Alpaca":
        return _with_system(row, names, _alpaca(row, names.get("history", "history")))
    if kind == "TRL":
        return pair(row, names.get("prompt", "prompt"), names.get("completion", "completion"), images, names)
    own = "conversations" if kind == "ShareGPT" else own
    return _checked(row, own, _with_system(row, names, _messages(row, own, images)))


def pair(
    row: Row, prompt: str, completion: str, images: bool = False, names: Mapping[str, str] = {}
) -> list[dict[str, Any]]:
    """The messages of a prompt and a completion that are lists of messages: of the prompt none is learned."""
    asked, answered = (_messages(row, name, images) for name in (prompt, completion))
    asked = [message | ({"weight": 0} if message["role"] == "assistant" else {}) for message in asked]
    if not any(message["role"] == "assistant" for message in answered):
        raise row.error(completion, "has no assistant turn, so no supervised token")
    return _checked(row, completion, _with_system(row, names, [*asked, *answered]))


def unanswered(row: Row, own: str) -> list[dict[str, Any]]:
    """The messages of ``row`` as a prompt: the last is not the assistant's. Raises InputError at the row."""
    messages = _messages(row, own, images=False)
    if messages[-1]["role"] == "assistant":
        raise row.error(f"{own}[{len(messages) - 1}]", "is the assistant's, which the model is to write; remove it")
    _check_results(row, own, messages)
    return messages


def _messages(row: Row, own: str, images: bool) -> list[dict[str, Any]]:
    value = row.value[own]
    if not isinstance(value, list):
        raise row.error(own, f"must be a list of {{role, content}}, not {kind_of(value)}")
    if not value:
        raise row.error(own, "is empty; a conversation needs at least one assistant turn")
    return [_message(row, f"{own}[{index}]", message, images) for index, message in enumerate(value)]


def _with_system(row: Row, names: Mapping[str, str], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    name = system_column(row.value, names)
    if name is None:
        return messages
    said = _content(row, name, row.value[name], "system")
    first = messages[0]
    if first["role"] not in ("system", "developer"):
        return [{"role": "system", "content": said}, *messages]
    if first["content"].strip() != said.strip():
        raise row.error(name, f"says something else than the conversation's own {first['role']} turn; keep one of them")
    return messages


def _checked(row: Row, own: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not any(message["role"] == "assistant" for message in messages):
        roles = ", ".join(sorted({message["role"] for message in messages}))
        raise row.error(own, f"has no assistant turn, so no supervised token (roles: {roles})")
    if not any(message["role"] == "assistant" and message.get("weight") != 0 for message in messages):
        raise row.error(own, "every assistant turn has weight 0 (not learned), so no token is supervised")
    _check_results(row, own, messages)
    return messages


def tools(row: Row, own: str) -> list[dict[str, Any]] | None:
    """The tools that ``row`` offers the assistant, as JSON schemas of functions, or None."""
    value = row.value.get(own)
    if value is None and own == "tools":
        value = row.value.get("functions")  # OpenAI's earlier name
    if isinstance(value, str):
        value = _json(row, own, value) if value.strip() else None
    if value is None or value == []:
        return None
    if not isinstance(value, list):
        raise row.error(own, f"must be a list of tools, not {kind_of(value)}")
    found = []
    for index, tool in enumerate(value):
        at = f"{own}[{index}]"
        if isinstance(tool, str):
            tool = _json(row, at, tool)
        if not isinstance(tool, dict):
            raise row.error(at, f"must be a tool {{type, function}}, not {kind_of(tool)}")
        function = tool.get("function", tool)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise row.error(f"{at}.function.name", "missing; a tool has a name, a description and parameters")
        function = {key: part for key, part in function.items() if key != "type" or function is not tool}
        if isinstance(function.get("parameters"), str):
            function["parameters"] = _json(row, f"{at}.function.parameters", function["parameters"])
        found.append({"type": "function", "function": _without_nulls(row, function)})
    return found


def template_options(row: Row, own: str) -> dict[str, Any]:
    """What a row gives its chat template beside the messages (``enable_thinking`` and the like)."""
    value = row.value.get(own)
    if isinstance(value, str):
        value = _json(row, own, value) if value.strip() else None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise row.error(own, f"must be an object of template arguments, not {kind_of(value)}")
    return {str(key): part for key, part in value.items() if part is not None}


def _alpaca(row: Row, past: str) -> list[dict[str, Any]]:
    for name in ("instruction", "output"):
        check_text(row, name, row.value[name])
    asked, given, output = row.value["instruction"], row.value.get("input") or "", row.value["output"]
    check_text(row, "input", given)
    if not output.strip():
        raise row.error("output", "is empty; remove this sample")
    question = f"{asked}\n\n{given}" if given.strip() else asked
    return [
        *_history(row, past, row.value.get(past)),
        {"role": "user", "content": question},
        {"role": "assistant", "content": output},
    ]


def _history(row: Row, own: str, value: Any) -> list[dict[str, Any]]:
    """Earlier turns of an Alpaca row: a list of [instruction, answer]."""
    if not value:
        return []
    if not isinstance(value, list):
        raise row.error(own, f"must be a list of [instruction, answer], not {kind_of(value)}")
    found = []
    for index, turn in enumerate(value):
        if not isinstance(turn, list) or len(turn) != 2:
            raise row.error(f"{own}[{index}]", "must be [instruction, answer]")
        for role, text in zip(("user", "assistant"), turn, strict=True):
            check_text(row, f"{own}[{index}]", text)
            found.append({"role": role, "content": text})
    return found


def _message(row: Row, at: str, message: Any, images: bool) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise row.error(at, f"must be {{role, content}}, not {kind_of(message)}")
    # Parquet gives every message the keys of all; a missing key and null mean the same.
    present = {str(key): part for key, part in message.items() if part is not None}
    if "from" in present and "value" in present and "role" not in present:
        present = _sharegpt(row, at, present)
    if "role" not in present:
        near = did_you_mean("role", present)
        raise row.error(f"{at}.role", f"missing; the keys are: {', '.join(present)}{near}")
    check_text(row, f"{at}.role", present["role"])
    if present["role"] not in ROLES:
        near = did_you_mean(present["role"], ROLES)
        raise row.error(f"{at}.role", f"unknown role {present['role']!r}{near}; known are {', '.join(ROLES)}")
    if "function_call" in present and "tool_calls" not in present:  # OpenAI's earlier form
        present["tool_calls"] = [present.pop("function_call")]
    calls = present.pop("tool_calls", None)
    if calls := _calls(row, f"{at}.tool_calls", calls):
        if present["role"] != "assistant":
            raise row.error(f"{at}.tool_calls", f"only an assistant calls tools, and this role is {present['role']}")
        present["tool_calls"] = calls
    for name in REASONING:
        if name in present:
            check_text(row, f"{at}.{name}", present[name])
    reasoning = next((present[name] for name in REASONING if present.get(name)), "")
    present = {key: part for key, part in present.items() if key not in REASONING}
    if reasoning:
        present["reasoning_content"] = reasoning
    present = with_weight(row, at, present)
    if "content" not in present:
        if not calls:
            near = did_you_mean("content", present)
            raise row.error(f"{at}.content", f"missing; the keys are: {', '.join(present)}{near}")
        present["content"] = ""
    found: list[Any] | None = [] if images else None
    present["content"] = _content(row, f"{at}.content", present["content"], present["role"], found)
    return present | ({"images": found} if found else {})


def _sharegpt(row: Row, at: str, present: dict[str, Any]) -> dict[str, Any]:
    said, value = present["from"], present["value"]
    if said not in _SHAREGPT:
        near = did_you_mean(str(said), _SHAREGPT)
        raise row.error(f"{at}.from", f"unknown role {said!r}{near}; known are {', '.join(_SHAREGPT)}")
    rest = {key: part for key, part in present.items() if key not in ("from", "value")}
    if said in _CALLS:
        calls = _json(row, f"{at}.value", value) if isinstance(value, str) else value
        return rest | {"role": "assistant", "content": "", "tool_calls": calls if isinstance(calls, list) else [calls]}
    return rest | {"role": _SHAREGPT[said], "content": value}


def _content(row: Row, at: str, content: Any, role: str, images: list[Any] | None = None) -> str:
    """Parts of text are joined, as templates that take parts join them. ``images``: takes the images of the parts."""
    if role in RESULTS and isinstance(content, dict):
        return json.dumps(_without_nulls(row, content), ensure_ascii=False)
    if isinstance(content, list):
        texts: list[str] = []
        for index, part in enumerate(content):
            text = part.get("text") if isinstance(part, dict) else part
            if images is not None and isinstance(part, dict) and part.get("type") in _IMAGES:
                images.append(image_of_part(part))
                texts.append(MARK)
                continue
            if isinstance(part, dict) and part.get("type", "text") in _OTHER_KINDS:
                raise row.error(f"{at}[{index}]", f"is of type {part['type']}; {_TAKES[images is not None]}")
            check_text(row, f"{at}[{index}].text", text)
            texts.append(str(text))
        return "".join(texts)
    check_text(row, at, content)
    return str(content)


def _calls(row: Row, at: str, value: Any) -> list[dict[str, Any]]:
    if isinstance(value, str):
        value = _json(row, at, value) if value.strip() else None
    if value is None:
        return []
    if not isinstance(value, list):
        raise row.error(at, f"must be a list of calls, not {kind_of(value)}")
    found = []
    for index, call in enumerate(value):
        here = f"{at}[{index}]"
        if isinstance(call, str):
            call = _json(row, here, call)
        if not isinstance(call, dict):
            raise row.error(here, f"must be a call {{function: {{name, arguments}}}}, not {kind_of(call)}")
        function = call.get("function") or call
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name:
            raise row.error(f"{here}.function.name", "missing; a call has a name and arguments")
        arguments = function.get("arguments", function.get("parameters"))
        if isinstance(arguments, str):
            arguments = _json(row, f"{here}.function.arguments", arguments) if arguments.strip() else {}
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, dict):
            raise row.error(f"{here}.function.arguments", f"must be an object, not {kind_of(arguments)}")
        one = {"type": "function", "function": {"name": name, "arguments": _without_nulls(row, arguments)}}
        found.append(one | ({"id": call["id"]} if isinstance(call.get("id"), str) else {}))
    return found


def _check_results(row: Row, own: str, messages: list[dict[str, Any]]) -> None:
    """A tool's result follows the call that it answers."""
    open_calls: list[dict[str, Any]] | None = None
    for index, message in enumerate(messages):
        if message["role"] not in RESULTS:
            open_calls = message.get("tool_calls")
            continue
        if not open_calls:
            raise row.error(f"{own}[{index}]", "is a tool's result, and no assistant turn before it calls a tool")
        known = [call["id"] for call in open_calls if "id" in call]
        answered = message.get("tool_call_id")
        if answered is not None and known and answered not in known:
            calls = ", ".join(known)
            raise row.error(f"{own}[{index}].tool_call_id", f"{answered!r} is none of the calls before it ({calls})")


def _json(row: Row, at: str, text: Any) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise row.error(at, f"is not JSON: {error}") from None


def _without_nulls(row: Row, value: Any) -> Any:
    """Rows of Parquet give every object the keys of all; what is null there was not in the data."""
    if row.unit != "row":
        return value
    if isinstance(value, dict):
        return {key: _without_nulls(row, part) for key, part in value.items() if part is not None}
    return [_without_nulls(row, part) for part in value] if isinstance(value, list) else value
