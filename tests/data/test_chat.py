"""Conversations: exactly the assistant's tokens carry loss, one rule for every template."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from toolkit.data.formats import Example, Formatter
from toolkit.data.rows import Row
from toolkit.errors import InputError
from toolkit.recipe.schema import Recipe

Make = Callable[..., Recipe]
MakeTokenizer = Callable[..., PreTrainedTokenizerFast]
I = -100  # noqa: E741

TURN = "<|{{ m.role }}|> {{ m.content }} <|end|> "
PLAIN = "{% for m in messages %}" + TURN + "{% endfor %}{% if add_generation_prompt %}<|assistant|> {% endif %}"
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|> {% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }} <|end|>{% endgeneration %} "
    "{% else %}{{ m.content }} <|end|> {% endif %}{% endfor %}"
)
FORGETFUL = (
    "{% for m in messages %}<|{{ m.role }}|> {% if loop.last or m.role == 'user' %}{{ m.content }}{% endif %}"
    " <|end|> {% endfor %}{% if add_generation_prompt %}<|assistant|> {% endif %}"
)

U, A, E = 10, 11, 12
TWO_TURNS = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b c"},
    {"role": "user", "content": "d"},
    {"role": "assistant", "content": "e"},
]
IDS = [U, 4, E, A, 5, 6, E, U, 7, E, A, 8, E]
LABELS = [I, I, I, I, 5, 6, E, I, I, I, I, 8, E]


def samples(make_recipe: Make, tokenizer: Any, messages: list, **data: Any) -> list[Example]:
    recipe = make_recipe(train="x", format="messages", **data)
    return Formatter(recipe, tokenizer).examples(Row({"messages": messages}, "x.jsonl", 7))


def build(make_recipe: Make, tokenizer: Any, messages: list, **data: Any) -> Example:
    return samples(make_recipe, tokenizer, messages, **data)[0]


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_the_assistants_tokens_carry_loss(make_recipe: Make, make_tokenizer: MakeTokenizer, template: str) -> None:
    tokenizer = make_tokenizer(eos=False, template=template)
    assert build(make_recipe, tokenizer, TWO_TURNS) == Example(IDS, LABELS)
    assert build(make_recipe, tokenizer, TWO_TURNS, max_length=5) == Example(IDS[:5], LABELS[:5], cut=True)


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_the_template_alone_writes_special_tokens(
    make_recipe: Make, make_tokenizer: MakeTokenizer, template: str
) -> None:
    tokenizer = make_tokenizer(eos=False, bos=True, adds="<s> $A", template=template)
    assert build(make_recipe, tokenizer, TWO_TURNS).input_ids == IDS


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_the_end_is_taught_where_the_template_does_not_write_it(
    make_recipe: Make, make_tokenizer: MakeTokenizer, template: str
) -> None:
    tokenizer = make_tokenizer(template=template)
    assert build(make_recipe, tokenizer, TWO_TURNS) == Example([*IDS, 2], [*LABELS, 2])
    # After a user's last word the end is there, but not the assistant's to say.
    assert build(make_recipe, tokenizer, TWO_TURNS[:3]) == Example([*IDS[:10], 2], [*LABELS[:10], I])


def test_the_end_that_the_template_writes_is_not_doubled(make_recipe: Make, make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(eos=False, template=PLAIN)
    tokenizer.eos_token = "<|end|>"
    assert build(make_recipe, tokenizer, TWO_TURNS) == Example(IDS, LABELS)


def test_an_assistant_may_speak_first(make_recipe: Make, make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(eos=False, template=PLAIN)
    assert build(make_recipe, tokenizer, TWO_TURNS[1:3]) == Example([A, 5, 6, E, U, 7, E], [I, 5, 6, E, I, I, I])


def test_a_turn_that_the_template_rewrites_is_a_sample_of_its_own(
    make_recipe: Make, make_tokenizer: MakeTokenizer
) -> None:
    tokenizer = make_tokenizer(eos=False, template=FORGETFUL)
    first, second = samples(make_recipe, tokenizer, TWO_TURNS)
    assert first == Example(IDS[:7], LABELS[:7])
    assert second == Example([U, 4, E, A, E, U, 7, E, A, 8, E], [I, I, I, I, I, I, I, I, I, 8, E])
    assert samples(make_recipe, tokenizer, TWO_TURNS, turns="last") == [second]
    with pytest.raises(InputError, match=r"^x\.jsonl:7: messages\[1\]: the chat template writes.*data\.turns: auto"):
        build(make_recipe, tokenizer, TWO_TURNS, turns="all")


def test_words_that_the_template_itself_says_are_not_taken_for_the_first_turns(
    make_recipe: Make, make_tokenizer: MakeTokenizer
) -> None:
    tokenizer = make_tokenizer(eos=False, template="<|user|> b c <|end|> " + PLAIN)
    found = build(make_recipe, tokenizer, TWO_TURNS[1:2])
    assert found == Example([U, 5, 6, E, A, 5, 6, E], [I, I, I, I, I, 5, 6, E])


@pytest.mark.parametrize(("filter", "expected"), [("", '{"a": "b"}'), ("| tojson", '{"a": "b"}')])
def test_arguments_of_calls_are_json_and_not_what_python_prints(
    make_recipe: Make, make_tokenizer: MakeTokenizer, filter: str, expected: str
) -> None:
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments FILTER }} {% endfor %}"
    template = PLAIN.replace("{{ m.content }}", "{{ m.content }} " + calls.replace("FILTER", filter))
    call = {"function": {"name": "f", "arguments": {"a": "b"}}}
    messages = [TWO_TURNS[0], {"role": "assistant", "tool_calls": [call]}]
    recipe = make_recipe(train="x", format="messages")
    [fields] = Formatter(recipe, make_tokenizer(template=template)).fields(Row({"messages": messages}, "x.jsonl", 7))
    assert expected in fields["piece"].text


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_turns_by_the_recipe(make_recipe: Make, make_tokenizer: MakeTokenizer, template: str) -> None:
    tokenizer = make_tokenizer(eos=False, template=template)
    last = Example(IDS, [I] * 11 + LABELS[11:])
    assert samples(make_recipe, tokenizer, TWO_TURNS, turns="last") == [last]
    assert samples(make_recipe, tokenizer, TWO_TURNS, turns="each") == [Example(IDS[:7], LABELS[:7]), last]
    assert samples(make_recipe, tokenizer, TWO_TURNS, turns="all") == [Example(IDS, LABELS)]


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_a_turn_of_weight_0_is_shown_and_not_learned(
    make_recipe: Make, make_tokenizer: MakeTokenizer, template: str
) -> None:
    tokenizer = make_tokenizer(eos=False, template=template)
    messages = [TWO_TURNS[0], TWO_TURNS[1] | {"weight": 0}, *TWO_TURNS[2:]]
    assert samples(make_recipe, tokenizer, messages) == [Example(IDS, [I] * 11 + LABELS[11:])]


def test_a_turn_that_nothing_ends_is_learned_with_the_end_of_its_own_sample(
    make_recipe: Make, make_tokenizer: MakeTokenizer
) -> None:
    """GLM-4 writes no end of a turn: the next header would have to be learned, or nothing."""
    tokenizer = make_tokenizer(template=PLAIN.replace(" <|end|>", ""))
    first, second = samples(make_recipe, tokenizer, TWO_TURNS)
    assert first == Example([U, 4, A, 5, 6, 2], [I, I, I, 5, 6, 2])
    assert second == Example([U, 4, A, 5, 6, U, 7, A, 8, 2], [I, I, I, I, I, I, I, I, 8, 2])
    whole = build(make_recipe, tokenizer, TWO_TURNS, turns="all")
    assert whole == Example([U, 4, A, 5, 6, U, 7, A, 8, 2], [I, I, I, 5, 6, I, I, I, 8, 2])


def test_text_that_the_template_loses_is_an_error_at_the_row(make_recipe: Make, make_tokenizer: MakeTokenizer) -> None:
    deaf = PLAIN.replace("{{ m.content }}", "{% if m.role != 'system' %}{{ m.content }}{% endif %}")
    system = [{"role": "system", "content": "f"}, *TWO_TURNS]
    with pytest.raises(InputError, match=r"^x\.jsonl:7: messages\[0\]\.content: the chat template leaves .*'f'"):
        build(make_recipe, make_tokenizer(template=deaf), system)


def test_a_header_that_the_turn_does_not_begin_with_is_refused(
    make_recipe: Make, make_tokenizer: MakeTokenizer
) -> None:
    template = PLAIN.replace("<|assistant|> {% endif %}", "<|assistant|> f {% endif %}")
    with pytest.raises(InputError, match=r"messages\[3\]: .* does not begin this turn .*\{% generation %\}"):
        build(make_recipe, make_tokenizer(template=template), TWO_TURNS)


def test_a_template_from_a_file(make_recipe: Make, make_tokenizer: MakeTokenizer, tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(PLAIN)
    tokenizer = make_tokenizer(eos=False, template="{{ 'another' }}")
    assert build(make_recipe, tokenizer, TWO_TURNS, chat_template=str(file)) == Example(IDS, LABELS)


def test_no_template(make_recipe: Make, make_tokenizer: MakeTokenizer) -> None:
    with pytest.raises(InputError, match=r"data\.format: messages needs a chat template") as caught:
        build(make_recipe, make_tokenizer(), TWO_TURNS)
    assert "data.chat_template" in str(caught.value)


def test_a_template_that_refuses(make_recipe: Make, make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InputError, match=r"x\.jsonl:7: messages: the tokenizer's chat .*: roles must alternate"):
        build(make_recipe, tokenizer, TWO_TURNS)
    tokenizer = make_tokenizer(template="{% for %}")
    with pytest.raises(InputError, match="rejects this conversation"):
        build(make_recipe, tokenizer, TWO_TURNS)
