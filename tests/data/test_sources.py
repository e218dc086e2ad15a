"""The same rows from every kind of source."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from cases import every_case
from toolkit.data.loader import open_data
from toolkit.data.sources import named_sources, open_named, open_source
from toolkit.errors import InputError
from toolkit.recipe.schema import Recipe

Make = Callable[..., Recipe]
ROWS = [{"text": "a"}, {"text": "b\u2028c"}, {"text": "d"}]


def values(recipe: Recipe) -> list[Any]:
    source = open_source(recipe, "train")
    first, second = (list(source.rows()) for _ in range(2))
    assert first == second
    return [row.value for row in first]


@every_case("name", ["a.jsonl", "a.jsonl.gz", "a.json", "lines.json", "a.parquet", "a.JSONL"])
def test_kinds_of_files(make_recipe: Make, tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)
    match name:
        case "a.jsonl.gz":
            file.write_bytes(gzip.compress(lines.encode()))
        case "a.json":
            file.write_text(json.dumps(ROWS, indent=1), encoding="utf-8")
        case "a.parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{**row, "id": 1} for row in ROWS]), file)
        case _:
            file.write_bytes(b"\xef\xbb\xbf" + lines.encode())
    assert values(make_recipe(train=file)) == ROWS


def test_a_text_file_is_one_sample(make_recipe: Make, tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("one\n\ntwo\n")
    (tmp_path / "a.txt").write_text("three")
    assert values(make_recipe(train=tmp_path / "b.txt")) == [{"text": "one\n\ntwo\n"}]
    assert values(make_recipe(train=tmp_path)) == [{"text": "three"}, {"text": "one\n\ntwo\n"}]


def test_a_folder_is_its_data_files_by_name(make_recipe: Make, write_jsonl: Any, tmp_path: Path) -> None:
    write_jsonl([{"text": "b"}], "data/b.jsonl")
    write_jsonl([{"text": "a"}], "data/a.jsonl")
    write_jsonl([{"text": "c"}], "data/c/a.jsonl")
    write_jsonl([{"text": "hidden"}], "data/.cache/a.jsonl")
    write_jsonl([], "data/empty.jsonl")
    (tmp_path / "data" / "README.md").write_text("read me")
    recipe = make_recipe(train=tmp_path / "data")
    assert values(recipe) == [{"text": "a"}, {"text": "b"}, {"text": "c"}]
    assert open_source(recipe, "train").notes == ("data.train: 3 files, a.jsonl to a.jsonl",)


def test_messages_are_the_same_from_parquet_and_jsonl(
    make_recipe: Make, make_tokenizer: Any, write_jsonl: Any, tmp_path: Path
) -> None:
    template = "{% for m in messages %}<|{{ m.role }}|> {{ m.content }}{{ m.extra is defined }} {% endfor %}"
    tokenizer = make_tokenizer(template=template + "{% if add_generation_prompt %}<|assistant|> {% endif %}")
    chat = [{"role": "user", "content": "a", "extra": "x"}, {"role": "assistant", "content": "b"}]
    table = pyarrow.Table.from_pylist([{"messages": chat}])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert table.to_pylist()[0]["messages"][1]["extra"] is None
    one, two = (
        open_data(make_recipe(train=file, format="messages"), "train", tokenizer)[0]
        for file in (write_jsonl([{"messages": chat}]), tmp_path / "a.parquet")
    )
    assert one == two


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """A hub with one data set of two splits; what was asked of it is listed."""
    asked: list[tuple] = []

    def load(name: str, config: str | None, split: str, streaming: bool) -> Any:
        asked.append((name, config, split, streaming))
        data = datasets.Dataset.from_list([{"text": split, "id": 0}, {"text": "b", "id": 1}])
        return data.to_iterable_dataset() if streaming else data

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name, config: ["train", "test"])
    return asked


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("spec", "config", "split"),
    [("org/name", None, "train"), ("name:part", None, "part"), ("org/name:main:test", "main", "test")],
)
def test_a_hub_data_set(
    make_recipe: Make, hub: list[tuple], spec: str, config: str | None, split: str, streaming: bool
) -> None:
    recipe = make_recipe(train=spec, streaming=streaming)
    assert values(recipe) == [{"text": split}, {"text": "b"}]
    assert hub == [(spec.split(":")[0], config, split, streaming)]


def test_the_hubs_split_for_evaluation(make_recipe: Make, hub: list[tuple], monkeypatch: Any) -> None:
    recipe = make_recipe(train="org/name", eval="org/name")
    open_source(recipe, "eval")
    assert hub[-1][2] == "test"
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name, config: ["one", "two"])
    with pytest.raises(InputError, match=r"data\.train: org/name has the splits one, two; select one: org/name:SPLIT"):
        open_source(recipe, "train")


def test_a_bad_row_of_a_hub_data_set(make_recipe: Make, make_tokenizer: Any, hub: list[tuple]) -> None:
    recipe = make_recipe(train="org/name", fields={"text": "txt"})
    with pytest.raises(InputError, match=r"org/name \(train\): row 1: txt: missing; the fields are: text, id"):
        open_data(recipe, "train", make_tokenizer())


def test_neither_here_nor_on_the_hub(make_recipe: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: Any) -> None:
        raise ConnectionError("no route\nand more")

    monkeypatch.setattr(datasets, "get_dataset_split_names", unreachable)
    with pytest.raises(InputError) as caught:
        open_source(make_recipe(train="org/name"), "train")
    assert str(caught.value) == (
        "data.train: org/name is neither a local file or folder nor a reachable hub data set (no route)"
    )


def test_a_hub_source_with_keys_of_its_own(make_recipe: Make, hub: list[tuple], monkeypatch: Any) -> None:
    seen: list[dict[str, Any]] = []
    load = datasets.load_dataset

    def loaded(*args: Any, revision: str | None = None, **options: Any) -> Any:
        seen.append({"revision": revision})
        return load(*args, **options)

    monkeypatch.setattr(datasets, "load_dataset", loaded)
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name, config, revision=None: ["train", "test"])
    given = {"path": "org/name", "name": "main", "split": "test", "revision": "abc", "fields": {"text": "id"}}
    [named] = named_sources(make_recipe(train=[given]), "train")
    assert [row.value for row in open_named(named, "train").rows()] == [{"id": 0}, {"id": 1}]
    assert (hub, seen) == ([("org/name", "main", "test", False)], [{"revision": "abc"}])
    [named] = named_sources(make_recipe(train=[given | {"split": "tset"}]), "train")
    with pytest.raises(InputError) as caught:
        open_named(named, "train")
    message = "data.train[0].split: org/name has the splits train, test, not tset; did you mean test?"
    assert str(caught.value) == message
