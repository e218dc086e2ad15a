"""What a template writes behind the token that ends a turn is not the assistant's: it is not supervised."""

from __future__ import annotations

from typing import Any

import pytest

from cases import every_case
from data import templates
from data.templates import CONVERSATIONS, LOSES, REFUSES, tokenizer_for
from toolkit.data.chat import Chat
from toolkit.data.fields import canonical_row
from toolkit.data.rows import Row

ASK, SAY = {"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}
CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}
TURN = "{% for m in messages %}HEAD{{ m.role }}\n{{ m.content }}"
CALLS = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
ASKS = "{% if add_generation_prompt %}HEADassistant\n{% endif %}"


def template(head: str, behind: str, calls: str = "", last: str = "") -> str:
    end = f"{{% if loop.last and not add_generation_prompt %}}{last}{{% endif %}}" if last else ""
    return f"{TURN}{calls}{behind}{end}{{% endfor %}}{ASKS}".replace("HEAD", head)


def spans(text: str, messages: list[dict[str, Any]]) -> list[str]:
    chat = Chat(tokenizer_for(text), None)
    row = Row({"messages": messages}, "x", 1)
    fields = canonical_row(row, {"messages": "messages"})
    found = []
    for piece in chat.pieces(row, fields):
        assert piece.spans is not None
        found += [piece.text[start:end] for start, end in piece.spans]
        ids, supervised = chat.encode(row, piece)
        learned = [token for token, on in zip(ids, supervised, strict=True) if on]
        assert chat._tokenizer.decode(learned) == "".join(piece.text[start:end] for start, end in piece.spans)
    return found


@every_case(
    ("text", "end"),
    [
        (template("<|im_start|>", "<|im_end|>\n"), "<|im_end|>"),
        (template("<|im_start|>", " <|im_end|>\n\n"), " <|im_end|>"),
        (template("<|start|>", "<|eot|>"), "<|eot|>"),
        (template("<s>", "</s> "), "</s>"),
        (template("<start_of_turn>", "<end_of_turn>\n"), "<end_of_turn>"),
        (template("<|user|>", "<|end|>\n", last="<|endoftext|>"), "<|end|>"),
    ],
    ids=["ChatML", "a blank before it", "Llama 3", "Llama 2", "Gemma", "Phi-3"],
)
def test_a_turn_is_learned_to_its_end_token(text: str, end: str) -> None:
    assert spans(text, [ASK, SAY, ASK, SAY]) == [f"Yes.{end}"] * 2


def test_a_call_ends_with_the_turn_s_token_not_with_its_own() -> None:
    text = template("<|im_start|>", "<|im_end|>\n", CALLS)
    calling = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    result = {"role": "tool", "content": "1"}
    first, second = spans(text, [ASK, calling, result, SAY])
    assert first.endswith("</tool_call><|im_end|>")
    assert second == "Yes.<|im_end|>"


def test_words_that_end_in_white_space_keep_it_where_no_token_ends_the_turn() -> None:
    text = "{% for m in messages %}\n### {{ m.role }}:\n{{ m.content }}{% endfor %}" + (
        "{% if add_generation_prompt %}\n### assistant:\n{% endif %}"
    )
    assert spans(text, [ASK, SAY | {"content": "Yes. "}]) == ["Yes. "]


@pytest.mark.skipif(not templates.names(), reason="TRL's templates are not installed")
@every_case("name", templates.names() or ["none"])
def test_no_published_template_has_a_supervised_token_behind_the_end(name: str) -> None:
    for conversation in CONVERSATIONS:
        if conversation in (*REFUSES.get(name, ()), *LOSES.get(name, ())):
            continue
        result, chat, _ = templates.encode(name, conversation)
        for piece in result.pieces:
            for start, end in piece.spans or ():
                said = piece.text[start:end]
                if chat._special.has(said[len(said.rstrip()) - 3 :]) or said.rstrip().endswith((">", "]")):
                    assert said == said.rstrip()
