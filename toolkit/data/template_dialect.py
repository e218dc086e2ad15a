"""How a chat template wants its messages: found out once, by what it writes of a few words."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from jinja2 import TemplateError

Message = dict[str, Any]

_PROBE = "zqxprobe"
_THOUGHT = re.compile(r"\A\s*<think>(.*?)</think>\s*", re.DOTALL)
_REASONING = ("reasoning_content", "thinking", "reasoning")
# What a template may raise at a probe: the real conversation is what is reported.
_QUIET = (TemplateError, TypeError, ValueError, LookupError, AttributeError)


class Dialect:
    """What one template takes and writes. ``render``: messages (and template arguments) to text; it may raise whatever
    the template raises.

    ``header``: what a generation prompt adds. ``behind``: what is written behind an assistant's words.
    """

    def __init__(self, template: str, render: Callable[..., str]) -> None:
        self._parts = _wants_parts(render)
        self._reasoning = [name for name in _REASONING if re.search(rf"\b{name}\b", template)]
        self._in_content = not self._reasoning
        self._switch = re.search(r"\benable_thinking\b", template) is not None
        self._as_strings: bool | None = True if self._prints_objects(render) else None
        self.wrote_reasoning = False
        """Whether reasoning was written into the content, for want of a place of its own."""
        self.header, self.behind = self._around(render)

    def call(self, apply: Callable[[list[Message]], Any], messages: list[Message]) -> Any:
        """``apply`` with the messages as the template takes them. Arguments of calls are objects, or JSON strings where
        the template can only join strings."""
        has_calls = any("tool_calls" in message for message in messages)
        if not has_calls or self._as_strings is not None:
            return apply([self._message(message, bool(self._as_strings)) for message in messages])
        try:
            found = apply([self._message(message, False) for message in messages])
            self._as_strings = False
        except TypeError:
            found = apply([self._message(message, True) for message in messages])
            self._as_strings = True
        return found

    def switches_thinking(self, options: dict[str, Any], fields: dict[str, Any]) -> bool:
        """Whether the template asks for ``enable_thinking`` and nobody has set it."""
        return self._switch and not any(
            "enable_thinking" in given for given in (options, fields["chat_template_kwargs"])
        )

    def reasoning_of(self, message: Message) -> str:
        """An assistant's reasoning, from its own field or from a ``<think>`` block that its content begins with."""
        if found := message.get("reasoning_content"):
            return str(found)
        block = _THOUGHT.match(message["content"])
        return block.group(1) if block else ""

    def texts(self, message: Message) -> Iterator[tuple[str, str]]:
        """Everything of a message that its sample has to show: (key, text)."""
        content = message["content"]
        if message["role"] == "assistant":
            if reasoning := self.reasoning_of(message):
                yield "reasoning_content", reasoning.strip()
                content = _THOUGHT.sub("", content, count=1)
            for number, call in enumerate(message.get("tool_calls", ())):
                yield f"tool_calls[{number}].function.name", call["function"]["name"]
                for name, value in call["function"]["arguments"].items():
                    if isinstance(value, str):
                        yield f"tool_calls[{number}].function.arguments.{name}", value
        yield "content", content.strip()

    def _prints_objects(self, render: Callable[..., str]) -> bool:
        """Whether the template writes a call's arguments as Python prints them, unless they are JSON strings."""
        call = {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": {_PROBE: _PROBE}}}
        turns: list[Message] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        try:
            return str({_PROBE: _PROBE}) in render([self._message(turn, False) for turn in turns])
        except _QUIET:
            return False

    def _around(self, render: Callable[..., str]) -> tuple[str, str]:
        asked, answered = {"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}
        try:
            shown = render([self._message(asked, False)])
            prompt = render([self._message(asked, False)], add_generation_prompt=True)
            whole = render([self._message(turn, False) for turn in (asked, answered)])
        except _QUIET:
            return "", ""
        return (prompt.removeprefix(shown) if prompt.startswith(shown) else ""), whole.rpartition(_PROBE)[2]

    def _message(self, message: Message, as_strings: bool) -> Message:
        found = {key: part for key, part in message.items() if key not in ("weight", "reasoning_content")}
        if reasoning := message.get("reasoning_content"):
            if self._in_content:
                self.wrote_reasoning = True
                found["content"] = f"<think>\n{reasoning.strip()}\n</think>\n\n{message['content']}"
            found |= dict.fromkeys(self._reasoning, reasoning)
        if self._parts:
            found["content"] = [{"type": "text", "text": found["content"]}]
        if as_strings and "tool_calls" in found:
            found["tool_calls"] = [_with_string(call) for call in found["tool_calls"]]
        return found


def _with_string(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return call | {"function": function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _wants_parts(render: Callable[..., str]) -> bool:
    """Whether a plain string as content is lost, and a list of parts is not (templates of vision-language models)."""
    try:
        if _PROBE in render([{"role": "user", "content": _PROBE}]):
            return False
    except _QUIET:
        pass
    try:
        return _PROBE in render([{"role": "user", "content": [{"type": "text", "text": _PROBE}]}])
    except _QUIET:
        return False
