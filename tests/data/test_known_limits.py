"""Every mistake in the data that shows before anything heavy is imported, and its message."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from cases import every_case
from toolkit.data import preflight
from toolkit.data.preflight import check_data
from toolkit.errors import InputError
from toolkit.recipe.schema import Recipe

Make = Callable[..., Recipe]
Write = Callable[..., Path]


def refusal(recipe: Recipe) -> str:
    with pytest.raises(InputError) as caught:
        check_data(recipe)
    return str(caught.value)


GOOD_CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo", "extra": [1]}]
TOOL_CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}


@every_case(
    ("data", "row"),
    [
        ({"format": "text"}, {"text": "a", "id": 3}),
        ({"format": "text"}, {"text": ""}),
        ({"format": "text", "fields": {"text": "body"}}, {"body": "a"}),
        ({"format": "prompt-completion"}, {"prompt": "", "completion": "b"}),
        ({"format": "messages"}, {"messages": GOOD_CHAT}),
        ({"format": "messages"}, {"messages": [TOOL_CALL]}),
        ({"task": "seq2seq-lm", "format": "prompt-completion"}, {"prompt": "a", "completion": "b"}),
        ({"task": "sequence-classification"}, {"text": "a", "label": 0}),
        ({"task": "sequence-classification"}, {"text": "a", "label": "spam"}),
        ({"task": "sequence-regression"}, {"text": "a", "label": -100.0}),
        ({"task": "sequence-regression", "fields": {"label": "score"}}, {"text": "a", "score": 3}),
    ],
)
def test_good_rows_pass(make_recipe: Make, write_jsonl: Write, data: dict, row: dict) -> None:
    check_data(make_recipe(train=write_jsonl([row, "", row]), **data))


# One row that cannot be used: recipe data, the line as written, and what the message must say.
BAD_ROWS: list[tuple[dict[str, Any], Any, list[str]]] = [
    ({}, '{"text": "a"', [":2: not valid JSON", "column"]),
    ({}, '{"text": "a"} {"text": "b"}', [":2: not valid JSON: Extra data"]),
    ({}, "[1]", [":2: a sample must be an object", "not a list"]),
    ({}, "[" * 100_000, [":2: not valid JSON"]),
    ({}, {"txt": "a", "id": 1}, [":2: text: missing", "txt, id", "did you mean txt?", "data.fields"]),
    ({}, {"text": 3}, [":2: text: must be a string, not 3"]),
    ({}, {"text": None}, [":2: text: must be a string, not null"]),
    ({}, '{"text": "a\\ud800"}', [":2: text: unpaired surrogate at character 1"]),
    ({"format": "prompt-completion"}, {"prompt": "a"}, [":2: completion: missing"]),
    ({"format": "prompt-completion"}, {"prompt": "a", "completion": ""}, [":2: completion: is empty"]),
    ({"format": "messages"}, {"messages": "hi"}, [":2: messages: must be a list", "a string"]),
    ({"format": "messages"}, {"messages": []}, [":2: messages: is empty"]),
    ({"format": "messages"}, {"messages": ["hi"]}, [":2: messages[0]: must be {role, content}"]),
    ({"format": "messages"}, {"messages": [{"role": "user", "contents": "hi"}]}, [":2: messages[0].content: missing",
     "did you mean contents?"]),
    ({"format": "messages"}, {"messages": [{"role": "assistant", "content": None}]},
     [":2: messages[0].content: missing", "the keys are: role"]),
    ({"format": "messages"}, {"messages": GOOD_CHAT[:1]}, [":2: messages: has no assistant turn", "user"]),
    ({"task": "sequence-classification"}, {"text": "a", "label": True}, [":2: label: must be an integer"]),
    ({"task": "sequence-classification"}, {"text": "a", "label": 0.5}, [":2: label: must be", "not 0.5"]),
    ({"task": "sequence-regression"}, {"text": "a", "label": "4"}, [":2: label: must be a number, not the string '4'"]),
    ({"task": "sequence-regression"}, {"text": "a", "label": None}, [":2: label: must be a number, not null"]),
    ({"task": "sequence-regression"}, {"text": "a", "label": True}, [":2: label: must be a number, not True"]),
    ({"task": "sequence-regression"}, '{"text": "a", "label": NaN}',
     [":2: label: must be a number in float32's range"]),
    ({"task": "sequence-regression"}, {"text": "a", "label": 1e39}, [":2: label: ", "float32's range, not 1e+39"]),
    ({"task": "sequence-regression"}, {"text": "a", "lable": 1.0}, [":2: label: missing", "{label: ...}"]),
]  # fmt: skip


@every_case(("data", "row", "said"), BAD_ROWS)
def test_a_bad_row_is_reported_with_its_line(
    make_recipe: Make, write_jsonl: Write, data: dict, row: Any, said: list[str]
) -> None:
    good = {"text": "a", "prompt": "a", "completion": "b", "messages": GOOD_CHAT, "label": 0}
    train = write_jsonl([good, row])
    message = refusal(make_recipe(train=train, **data))
    assert message.startswith(f"{train}:2: ")
    assert [part for part in said if part not in message] == []
    assert "\n" not in message


def test_bytes_that_are_not_utf8(make_recipe: Make, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    assert f"{file}:2: not UTF-8 (byte 10)" in refusal(make_recipe(train=file))
    text = tmp_path / "a.txt"
    text.write_bytes(b"one\ntwo\n\xff")
    assert f"{text}:3: not UTF-8" in refusal(make_recipe(train=text))


def test_paths_that_are_not_there(make_recipe: Make, write_jsonl: Write, tmp_path: Path) -> None:
    write_jsonl([{"text": "a"}])
    message = refusal(make_recipe(train=tmp_path / "trian.jsonl"))
    assert message == f"data.train: {tmp_path}/trian.jsonl does not exist; did you mean train.jsonl?"
    message = refusal(make_recipe(train=tmp_path / "no" / "such" / "a.jsonl"))
    gone = f"data.train: {tmp_path}/no/such/a.jsonl does not exist (there is no folder {tmp_path}/no)"
    assert message == f'{gone}; expected a row a line, for example {{"text": "What is 1 plus 1? 2"}}'
    for spec in ("missing.txt", "./missing", "a/b/c", "~/no-such-folder-here"):
        assert "does not exist" in refusal(make_recipe(train=spec))
    check_data(make_recipe(train="org/name", eval="squad"))  # may be on the hub: left to the run


def test_mistakes_in_train_and_eval_are_reported_together(make_recipe: Make, tmp_path: Path) -> None:
    problems = refusal(make_recipe(train=tmp_path / "a.jsonl", eval=tmp_path / "b.jsonl")).splitlines()
    assert [line.split(":")[0] for line in problems] == ["data.train", "data.eval"]


def test_nothing_to_read(make_recipe: Make, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    assert refusal(make_recipe(train=empty)) == f"data.train: {empty} is empty"
    empty.write_text("\n\n")
    assert refusal(make_recipe(train=empty)) == f"data.train: {empty} has no samples"
    blank = tmp_path / "list.json"
    blank.write_text("[]")
    assert refusal(make_recipe(train=blank)) == f"data.train: {blank} has no samples"
    folder = tmp_path / "folder"
    folder.mkdir()
    assert refusal(make_recipe(train=folder)) == f"data.train: the folder {folder} is empty"
    (folder / "a.csv").write_text("x")
    assert "has no data file" in refusal(make_recipe(train=folder))
    assert "a.csv" in refusal(make_recipe(train=folder))
    assert "is not a supported data file" in refusal(make_recipe(train=folder / "a.csv"))
    (folder / "a.jsonl").touch()
    assert "every data file in the folder" in refusal(make_recipe(train=folder))


def test_a_folder_of_texts_and_rows_is_refused(make_recipe: Make, write_jsonl: Write, tmp_path: Path) -> None:
    write_jsonl([{"text": "a"}], "both/train.jsonl")
    (tmp_path / "both" / "LICENSE.txt").write_text("mine")
    message = refusal(make_recipe(train=tmp_path / "both"))
    assert "LICENSE.txt" in message
    assert "train.jsonl" in message


def test_json_lists(make_recipe: Make, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('[\n{"text": "a"},\n{"txt": "b"}\n]')
    assert refusal(make_recipe(train=file)).startswith(f"{file}:3: text: missing")
    file.write_text('[\n{"text": "a"},\n{"text": b}\n]')
    assert refusal(make_recipe(train=file)).startswith(f"{file}:3: not valid JSON")
    file.write_text('[{"text": "a"}\n{"text": "b"}]')
    assert refusal(make_recipe(train=file)).startswith(f"{file}:2: not valid JSON")
    file.write_text('[{"text": "a"}')
    assert refusal(make_recipe(train=file)).startswith(f"{file}:1: not valid JSON")
    file.write_text('[{"text": "a"}]\n]')
    assert refusal(make_recipe(train=file)).startswith(f"{file}:2: not valid JSON: text after the list")
    file.write_text('"a"')
    assert "a list of objects" in refusal(make_recipe(train=file))
    file.write_text('{"text": "a"}\n{"text": 1}')
    assert refusal(make_recipe(train=file)).startswith(f"{file}:2: text: must be a string")


def test_parquet(make_recipe: Make, tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None], "id": [1, 2]}), file)
    assert refusal(make_recipe(train=file)) == f"{file}: row 2: text: must be a string, not null"
    message = refusal(make_recipe(train=file, fields={"text": "body"}))
    assert message.startswith(f"{file}: row 1: body: missing; the fields are: text, id")
    file.write_bytes(b"PAR1 or not")
    assert f"{file}: not a readable Parquet file" in refusal(make_recipe(train=file))


def test_gzip(make_recipe: Make, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"text": "a"}\nnot json\n'))
    assert f"{file}:2: not valid JSON" in refusal(make_recipe(train=file))
    file.write_bytes(gzip.compress(b'{"text": "a"}\n' * 1000)[:-12])
    assert f"{file}: cannot be read" in refusal(make_recipe(train=file))
    file.write_bytes(b"plain")
    assert f"{file}: cannot be read" in refusal(make_recipe(train=file))


def test_formats_and_fields_that_do_not_fit(make_recipe: Make, write_jsonl: Write, tmp_path: Path) -> None:
    train = write_jsonl([{"text": "a"}])
    assert refusal(make_recipe(train=train, task="seq2seq-lm")) == (
        "data.format: text is not a format for seq2seq-lm; expected prompt-completion"
    )
    message = refusal(make_recipe(train=train, format="prompt-completion", fields={"promt": "question"}))
    assert message.startswith("data.fields.promt: ")
    assert "did you mean prompt?" in message
    (tmp_path / "a.txt").write_text("words")
    message = refusal(make_recipe(train=tmp_path / "a.txt", format="messages"))
    assert message.startswith("data.train: a text file has no fields")
    for key, value in {"chat_template": "t.jinja", "chat_template_kwargs": {"a": 1}, "turns": "last"}.items():
        message = refusal(make_recipe(train=train, **{key: value}))
        assert message == f"data.{key}: requires data.format: messages; here it is text"
    chat = write_jsonl([{"messages": GOOD_CHAT}], "chat.jsonl")
    check_data(make_recipe(train=chat, format="messages", turns="last", chat_template_kwargs={"a": 1}))
    message = refusal(make_recipe(train=chat, format="messages", chat_template=str(tmp_path / "t.jinja")))
    assert message == f"data.chat_template: {tmp_path}/t.jinja cannot be read: No such file or directory"


def test_large_files_are_not_read_to_their_end(
    make_recipe: Make, write_jsonl: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "CHECKED_ROWS", 3)
    rows = [json.dumps({"text": "a"})] * 3
    check_data(make_recipe(train=write_jsonl([*rows, "not json"])))
    assert ":3: not valid JSON" in refusal(make_recipe(train=write_jsonl([*rows[:2], "not json"])))
