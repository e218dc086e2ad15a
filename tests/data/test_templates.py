"""Published chat templates: each turn is learned as it would have been generated, or the template itself refuses."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from cases import every_case
from data import templates
from data.templates import CONVERSATIONS, LOSES, OTHER_MASK, OTHER_TEXT, REFUSES
from toolkit.data.chat import Chat, Piece

NAMES = templates.names()
pytestmark = pytest.mark.skipif(not NAMES, reason="TRL's templates are not installed")


@every_case("name", NAMES or ["none"])
def test_every_turn_is_learned_as_it_would_have_been_generated(name: str) -> None:
    for conversation in CONVERSATIONS:
        result, chat, fields = templates.encode(name, conversation)
        if conversation in REFUSES.get(name, ()):
            assert "rejects this conversation" in result.refused
        elif conversation in LOSES.get(name, ()):
            assert "leaves" in result.refused
            assert " out" in result.refused
        else:
            assert not result.refused
            _check_turns(chat, fields, result.pieces)
            _check_beside_trl(name, result)


def _check_turns(chat: Chat, fields: dict[str, Any], pieces: list[Piece]) -> None:
    """Every assistant turn once; before it what generation would have shown, in it its words and what ends it."""
    learned = []
    for piece in pieces:
        if piece.spans is None:  # the template's own marks
            assert len(pieces) == 1
            return
        for start, end in piece.spans:
            index = next(
                index
                for index, message in enumerate(fields["messages"])
                if index and message["role"] == "assistant" and _shown(chat, fields, index, piece.text[:start])
            )
            learned.append(index)
            words = piece.text[start:end]
            message = fields["messages"][index]
            assert message["content"].strip() in words
            assert message.get("reasoning_content", "") in words
            assert all(call["function"]["name"] in words for call in message.get("tool_calls", ()))
            assert chat._special.has(words) or piece.text.endswith(words), "the end of the turn is learned"
            for other in fields["messages"]:
                if other["role"] != "assistant":
                    assert other["content"].strip() not in words
    assert Counter(learned) == Counter(i for i, m in enumerate(fields["messages"]) if m["role"] == "assistant")


def _shown(chat: Chat, fields: dict[str, Any], index: int, text: str) -> bool:
    """Whether ``text`` is the template's own generation prompt before turn ``index``, with or without thinking."""
    options: dict[str, Any] = {"tools": fields["tools"]} if fields["tools"] else {}
    prompts = [
        chat._dialect.call(
            lambda messages, more=more: chat._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False, **options, **more
            ),
            fields["messages"][:index],
        )
        for more in ({}, {"enable_thinking": True})
    ]
    return text in prompts or text.removesuffix(chat._dialect.header) in prompts


def _check_beside_trl(name: str, result: templates.Result) -> None:
    if result.trl == "other text":
        assert name in OTHER_TEXT
    elif result.trl == "other mask":
        theirs, ours, _ = OTHER_MASK[name]
        assert result.theirs.replace(theirs, "") == "" if theirs else result.theirs == ""
        assert result.ours.replace(ours, "") == "" if ours else result.ours == ""


@pytest.mark.upstream
def test_no_difference_is_explained_that_is_not_there() -> None:
    found = {name: {templates.encode(name, c)[0].trl for c in ("one turn", "tools")} for name in NAMES}
    assert {name for name, kinds in found.items() if "other text" in kinds} == set(OTHER_TEXT)
    assert {name for name, kinds in found.items() if "other mask" in kinds} == set(OTHER_MASK)
    assert sum(kinds == {"equal"} or kinds == {"equal", ""} for kinds in found.values()) >= 14
