"""Ids and labels of each format, worked out by hand: a is 4, b is 5, ... end-of-sequence is 2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from cases import every_case
from toolkit.data.formats import Example, Formatter, label_names, padding_id, supervised_tokens
from toolkit.data.rows import Row
from toolkit.errors import InputError
from toolkit.recipe.schema import Recipe

Make = Callable[..., Recipe]
MakeTokenizer = Callable[..., PreTrainedTokenizerFast]
I = -100  # noqa: E741  # short, so that a row of labels reads as one


def build(recipe: Recipe, tokenizer: Any, names: list[str] | None = None, **row: Any) -> Example:
    return Formatter(recipe, tokenizer, names).examples(Row(row, "x.jsonl", 7))[0]


@every_case(
    ("tokenizer", "text", "max_length", "ids", "cut"),
    [
        ({}, "a b c", 8, [4, 5, 6, 2], False),  # ended with end-of-sequence
        ({"eos": False}, "a b c", 8, [4, 5, 6], False),  # there is none
        ({"bos": True, "adds": "<s> $A"}, "a b c", 8, [1, 4, 5, 6, 2], False),  # its own special tokens
        ({"bos": True, "adds": "<s> $A </s>"}, "a b c", 8, [1, 4, 5, 6, 2], False),  # never a second one
        ({"adds": "$A </s> <|end|>"}, "a", 8, [4, 2, 12], False),  # nor behind a language code
        ({}, "a b c", 4, [4, 5, 6, 2], False),  # just fits
        ({}, "a b c", 3, [4, 5, 6], True),  # cut: not ended
        ({"adds": "$A </s>"}, "a b c d", 3, [4, 5, 6], True),
        ({}, "a b c", 2, [4, 5], True),
        ({}, "", 8, [2], False),
        ({"eos": False}, "", 8, [], False),
    ],
)
def test_text(
    make_recipe: Make, make_tokenizer: MakeTokenizer, tokenizer: dict, text: str, max_length: int, ids: list, cut: bool
) -> None:
    example = build(make_recipe(train="x", max_length=max_length), make_tokenizer(**tokenizer), text=text)
    assert example == Example(ids, ids, cut)


@every_case(
    ("tokenizer", "prompt", "completion", "max_length", "ids", "labels"),
    [
        ({}, "a b ", "c d", 8, [4, 5, 6, 7, 2], [I, I, 6, 7, 2]),
        ({}, "a b", " c d", 8, [4, 5, 6, 7, 2], [I, I, 6, 7, 2]),
        ({"eos": False}, "a b ", "c d", 8, [4, 5, 6, 7], [I, I, 6, 7]),
        ({"bos": True, "adds": "<s> $A </s>"}, "a ", "c", 8, [1, 4, 6, 2], [I, I, 6, 2]),
        ({"adds": "$A </s>"}, "a", "   ", 8, [4, 2], [I, 2]),  # the tokenizer drops the whole completion
        ({}, "", "a b", 8, [4, 5, 2], [4, 5, 2]),
        ({}, "a b ", "c d", 3, [4, 5, 6], [I, I, 6]),
        ({}, "a b c ", "d", 2, [4, 5], [I, I]),  # nothing of the completion is left
    ],
)
def test_prompt_completion(
    make_recipe: Make,
    make_tokenizer: MakeTokenizer,
    tokenizer: dict,
    prompt: str,
    completion: str,
    max_length: int,
    ids: list,
    labels: list,
) -> None:
    recipe = make_recipe(train="x", format="prompt-completion", max_length=max_length)
    example = build(recipe, make_tokenizer(**tokenizer), prompt=prompt, completion=completion)
    assert (example.input_ids, example.labels) == (ids, labels)


def byte_level() -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(letters)} | {"bc": 256}
    backend = Tokenizer(models.BPE(vocabulary, [("b", "c")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_a_token_of_both_prompt_and_completion_is_completion(make_recipe: Make) -> None:
    tokenizer = byte_level()
    a, d = tokenizer.convert_tokens_to_ids(["a", "d"])
    recipe = make_recipe(train="x", format="prompt-completion")
    example = build(recipe, tokenizer, prompt="ab", completion="cd")
    assert (example.input_ids, example.labels) == ([a, 256, d], [I, 256, d])
    # One character of several tokens: all of them are completion.
    example = build(recipe, tokenizer, prompt="a", completion="\u20ac")
    assert example.labels == [I, *example.input_ids[1:]]
    assert len(example.input_ids) == 4


class Letters(PreTrainedTokenizer):
    """A tokenizer without offsets: a letter a token, wrapped in <s> and </s>."""

    def __init__(self, **options: Any) -> None:
        self._known = ["<s>", "</s>", "<unk>", *map(chr, range(10, 128))]
        super().__init__(bos_token="<s>", eos_token="</s>", unk_token="<unk>", **options)

    @property
    def vocab_size(self) -> int:
        return len(self._known)

    def get_vocab(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self._known)}

    def _tokenize(self, text: str, **options: Any) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return self._known.index(token) if token in self._known else 2

    def _convert_id_to_token(self, index: int) -> str:
        return self._known[index]

    def build_inputs_with_special_tokens(self, first: list[int], second: list[int] | None = None) -> list[int]:
        return [0, *first, 1]


def test_a_tokenizer_without_offsets(make_recipe: Make) -> None:
    tokenizer = Letters()
    assert not tokenizer.is_fast
    a, b, c = tokenizer.convert_tokens_to_ids(["a", "b", "c"])
    example = build(make_recipe(train="x", format="prompt-completion"), tokenizer, prompt="ab", completion="ca")
    assert (example.input_ids, example.labels) == ([0, a, b, c, a, 1], [I, I, I, c, a, 1])
    tokenizer.chat_template = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}" + (
        "{% if add_generation_prompt %}a{% endif %}"
    )
    chat = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]
    example = build(make_recipe(train="x", format="messages"), tokenizer, messages=chat)
    u = tokenizer.convert_tokens_to_ids("u")
    assert (example.input_ids, example.labels) == ([u, b, a, c, 1], [I, I, I, c, 1])


def test_seq2seq(make_recipe: Make, make_tokenizer: MakeTokenizer) -> None:
    recipe = make_recipe(task="seq2seq-lm", train="x", format="prompt-completion", max_length=3)
    tokenizer = make_tokenizer(adds="$A </s>")
    assert build(recipe, tokenizer, prompt="a b", completion="c") == Example([4, 5, 2], [6, 2])
    assert build(recipe, tokenizer, prompt="a b c", completion="c") == Example([4, 5, 6], [6, 2], cut=True)
    assert build(recipe, tokenizer, prompt="a", completion="c d e f") == Example([4, 2], [6, 7, 8], cut=True)


def test_classification(make_recipe: Make, make_tokenizer: MakeTokenizer) -> None:
    recipe = make_recipe(task="sequence-classification", train="x", num_labels=2, fields={"label": "y"})
    tokenizer = make_tokenizer(eos=False, bos=True, adds="<s> $A")
    assert build(recipe, tokenizer, text="a", y=1) == Example([1, 4], 1)
    assert build(recipe, tokenizer, ["ham", "spam"], text="a", y="spam") == Example([1, 4], 1)
    for label, names, said in (
        (2, None, "2 is not a class; classes are the integers from 0 to 1 (model.num_labels)"),
        (-1, None, "-1 is not a class"),
        ("eggs", ["ham", "spam"], "'eggs' is not a label of data.train (ham, spam)"),
        ("ham", None, "is the string 'ham', but other labels are integers"),
        (1, ["ham", "spam"], "is the number 1, but other labels are strings"),
    ):
        with pytest.raises(InputError, match=r"^x\.jsonl:7: y: ") as caught:
            build(recipe, tokenizer, names, text="a", y=label)
        assert said in str(caught.value)


def test_label_names_are_sorted_and_of_one_kind() -> None:
    assert label_names({"b", "a", "c"}, "data.train") == ["a", "b", "c"]
    assert label_names({2, 0}, "data.train") is None
    with pytest.raises(InputError, match=r"data\.train: labels are strings"):
        label_names({"a", 1}, "data.train")


def test_supervised_tokens() -> None:
    # A causal model never predicts its first position.
    assert supervised_tokens(Example([4, 5, 6], [4, 5, 6]), "causal-lm") == 2
    assert supervised_tokens(Example([4, 5, 6], [I, I, 6]), "causal-lm") == 1
    assert supervised_tokens(Example([4], [4]), "causal-lm") == 0
    assert supervised_tokens(Example([4], [5, 6, I]), "seq2seq-lm") == 2
    assert supervised_tokens(Example([4], 3), "sequence-classification") == 1


def test_padding_id(make_tokenizer: MakeTokenizer) -> None:
    assert padding_id(make_tokenizer()) == 0
    assert padding_id(make_tokenizer(pad=False)) == 2
    assert padding_id(make_tokenizer(pad=False, eos=False)) == 0


def test_text_beyond_the_tokenizers_own_length_is_whole(make_recipe: Make, make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer()
    tokenizer.model_max_length = 2
    tokenizer.backend_tokenizer.enable_truncation(2)
    assert build(make_recipe(train="x"), tokenizer, text="a b c").input_ids == [4, 5, 6, 2]


def test_a_bad_row_found_while_reading_has_the_same_message(
    make_recipe: Make, make_tokenizer: MakeTokenizer, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"x\.jsonl:7: text: missing; the fields are: txt; did you mean txt"):
        build(make_recipe(train="x"), make_tokenizer(), txt="a")
