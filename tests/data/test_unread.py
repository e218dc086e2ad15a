"""What is not read of rows reaches the samples, the notes and the JSON: from memory, the cache, a mixture, a stream."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from data.conftest import RecipeMaker
from inspection.conftest import Look, look, resolved_of  # noqa: F401
from toolkit.data.loader import open_data
from toolkit.errors import InputError

CHAT = "{% for m in messages %}<|{{ m.role }}|> {{ m.content }} <|end|> {% endfor %}" + (
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
Write = Callable[..., Path]


def test_columns_that_are_not_read_are_noted_with_their_rows(
    make_recipe: RecipeMaker, make_tokenizer: Any, write_jsonl: Write, tmp_path: Path
) -> None:
    file = write_jsonl([{"text": "a b", "id": 1}, {"text": "b c", "id": 2, "system": "d"}, {"text": "c"}])
    expected = [
        {"name": "id", "rows": 2, "why": "no field of this format"},
        {"name": "system", "rows": 1, "why": "data.format: messages reads it"},
    ]
    for cache in (False, str(tmp_path / "cache"), str(tmp_path / "cache")):  # in memory, made, and from the cache
        found = open_data(make_recipe(train=file, cache=cache), "train", make_tokenizer())
        assert found.unread == expected
        assert "data.train: not read: id (2 rows)" in found.notes
        assert "data.train: system is not read (1 row): data.format: messages reads it" in found.notes
    assert found.came.came == "cache"  # type: ignore[union-attr]
    streamed = open_data(make_recipe(train=file, streaming=True), "train", make_tokenizer())
    assert streamed.unread == expected
    assert "data.train: not read: id (2 of the first 100 rows)" in streamed.notes
    mixed = open_data(make_recipe(train=[{"path": str(file)}, {"path": str(file)}]), "train", make_tokenizer())
    assert mixed.unread == [expected[0] | {"rows": 4}, expected[1] | {"rows": 2}]
    clean = open_data(make_recipe(train=write_jsonl([{"text": "a"}], "clean.jsonl")), "train", make_tokenizer())
    assert not clean.unread
    assert not clean.notes


def test_columns_of_parquet_that_are_never_opened_are_noted(
    make_recipe: RecipeMaker, make_tokenizer: Any, tmp_path: Path
) -> None:
    table = {"text": ["a", "b", "c"], "id": [1, 2, 3], "score": [None, 0.5, None], "empty": [None] * 3,
             "nested": [{"a": 1}, None, {"a": 2}]}  # fmt: skip
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "rows.parquet")
    found = open_data(make_recipe(train=tmp_path / "rows.parquet"), "train", make_tokenizer())
    assert {one["name"]: one["rows"] for one in found.unread} == {"id": 3, "nested": 3, "score": 1}


def test_toolkit_data_lists_them(look: Look, make_tokenizer: Any, write_jsonl: Write) -> None:  # noqa: F811
    file = write_jsonl([{"text": "a", "chosen": "b"}])
    found = look(make_tokenizer(), train=file, format="text").fields
    [one] = found["unread_columns"]
    assert (one["name"], one["rows"]) == ("chosen", 1)
    assert look(make_tokenizer(), train=write_jsonl([{"text": "a"}])).fields["unread_columns"] == []


def test_prompt_and_completion_of_messages_go_through_the_chat_template(
    make_recipe: RecipeMaker, make_tokenizer: Any, write_jsonl: Write
) -> None:
    tokenizer = make_tokenizer(template=CHAT)
    row = {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b c"}]}
    ids, labels = [10, 4, 12, 11, 5, 6, 12, 2], [-100] * 4 + [5, 6, 12, 2]
    for form in ("prompt-completion", "messages"):
        found = open_data(make_recipe(train=write_jsonl([row]), format=form), "train", tokenizer)
        assert (found[0].input_ids, found[0].labels) == (ids, labels)  # type: ignore[index]
        assert not found.unread
        assert any("prompt and completion are lists of messages (TRL)" in note for note in found.notes)
    renamed = {"q": row["prompt"], "a": row["completion"]}
    fields = {"prompt": "q", "completion": "a"}
    for form in ("prompt-completion", "messages"):
        recipe = make_recipe(train=write_jsonl([renamed]), format=form, fields=fields)
        assert open_data(recipe, "train", tokenizer)[0].labels == labels  # type: ignore[index]
    mixed = write_jsonl([{"prompt": "a", "completion": "b"}, row])
    with pytest.raises(InputError, match=r"train.jsonl:2: prompt: is a list of messages"):
        open_data(make_recipe(train=mixed, format="prompt-completion"), "train", tokenizer)
    with pytest.raises(InputError, match="prompt: is a list of messages; this task"):
        open_data(make_recipe("seq2seq-lm", train=write_jsonl([row]), format="prompt-completion"), "train", tokenizer)


S, E = 1, 2


@pytest.mark.parametrize(
    ("adds", "form", "row", "ids"),
    [
        ("<s> $A", "text", {"text": "<s> a b"}, [S, 4, 5, E]),
        ("<s> $A </s>", "text", {"text": "<s> a b </s>"}, [S, 4, 5, E]),
        ("$A </s>", "text", {"text": "a b </s>"}, [4, 5, E]),
        ("<|user|> <s> $A", "text", {"text": "<|user|> <s> a"}, [10, S, 4, E]),
        ("<s> $A", "prompt-completion", {"prompt": "<s> a", "completion": " b"}, [S, 4, 5, E]),
        ("<s> $A </s>", "prompt-completion", {"prompt": "<s> a", "completion": " b </s>"}, [S, 4, 5, E]),
    ],
)  # fmt: skip
def test_a_token_that_text_and_tokenizer_write_is_there_once(
    adds: str, form: str, row: dict[str, str], ids: list[int],
    make_recipe: RecipeMaker, make_tokenizer: Any, write_jsonl: Write, tmp_path: Path,
) -> None:  # fmt: skip
    plain = {key: value.replace("<s>", "").replace("</s>", "").replace("<|user|>", "") for key, value in row.items()}
    tokenizer = make_tokenizer(bos=True, adds=adds)
    for cache in (str(tmp_path / "cache"),) * 2:
        recipe = make_recipe(train=write_jsonl([plain, row, row]), format=form, cache=cache)
        found = open_data(recipe, "train", tokenizer)
        first, second, _ = (found[index] for index in range(3))  # type: ignore[index]
        assert first.input_ids == second.input_ids == ids
        assert first.labels == second.labels
        [note] = found.notes
        assert note.startswith("data.train: 2 texts ")
    assert "special tokens" in note


def test_a_text_that_begins_twice_with_the_token_by_itself_stays(
    make_recipe: RecipeMaker, make_tokenizer: Any, write_jsonl: Write
) -> None:
    """The tokenizer adds none: the text's own tokens are its own."""
    file = write_jsonl([{"text": "<s> <s> a"}])
    found = open_data(make_recipe(train=file), "train", make_tokenizer(bos=True))
    assert found[0].input_ids == [S, S, 4, E]  # type: ignore[index]
    assert not found.notes


def test_a_prompt_that_is_nothing_but_the_token(
    make_recipe: RecipeMaker, make_tokenizer: Any, write_jsonl: Write
) -> None:
    file = write_jsonl([{"prompt": "<s>", "completion": " a"}])
    found = open_data(make_recipe(train=file, format="prompt-completion"), "train", make_tokenizer(True, adds="<s> $A"))
    assert (found[0].input_ids, found[0].labels) == ([S, 4, E], [-100, 4, E])  # type: ignore[index]


def test_an_encoder_s_prompt_and_a_decoder_s_target(
    make_recipe: RecipeMaker, make_tokenizer: Any, write_jsonl: Write
) -> None:
    file = write_jsonl([{"prompt": "a </s>", "completion": "b </s>"}])
    recipe = make_recipe("seq2seq-lm", train=file, format="prompt-completion")
    found = open_data(recipe, "train", make_tokenizer(adds="$A </s>"))
    assert (found[0].input_ids, found[0].labels) == ([4, E], [5, E])  # type: ignore[index]
    assert "2 texts" in found.notes[0]
