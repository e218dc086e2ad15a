"""Tokenised once: the same samples from the cache, another key for whatever decides them, no way to hang."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolkit.data import cache, key, opening
from toolkit.data.columns import Columns
from toolkit.data.formats import Example
from toolkit.data.loader import open_data
from toolkit.data.sources import open_source
from toolkit.errors import InputError
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve

Make = Callable[..., Recipe]
Write = Callable[..., Path]
TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }} <|end|> {% endfor %}"


def _rows(count: int = 40) -> list[dict[str, Any]]:
    draw = random.Random(0)
    return [{"prompt": " ".join(draw.choices("abcdef", k=draw.randint(1, 9))) + " ", "completion": "a b"}
            for _ in range(count)]  # fmt: skip


@pytest.mark.parametrize("task", ["causal-lm", "seq2seq-lm", "sequence-classification", "sequence-regression"])
def test_the_same_samples_from_the_cache(
    make_recipe: Make, make_tokenizer: Any, write_jsonl: Write, tmp_path: Path, task: str
) -> None:
    rows = _rows()
    form = "text" if task.startswith("sequence") else "prompt-completion"
    if form == "text":
        labels = [0.1, -100.0] if task == "sequence-regression" else ["x", "y"]
        rows = [{"text": row["prompt"], "label": labels[at % 2]} for at, row in enumerate(rows)]
    options = {"task": task, "train": write_jsonl(rows), "format": form, "max_length": 8}
    plain = open_data(make_recipe(cache=False, **options), "train", make_tokenizer())
    kept = make_recipe(cache=tmp_path / "kept", **options)
    made, again = (open_data(kept, "train", make_tokenizer()) for _ in range(2))
    assert (plain.came.came, made.came.came, again.came.came) == ("memory", "made", "cache")
    for one in (made, again):
        assert [one[i] for i in range(len(one))] == [plain[i] for i in range(len(plain))]
        assert one.supervised == plain.supervised
        assert one.notes == plain.notes
        assert one.label_names == plain.label_names
        assert one.lengths().tolist() == plain.lengths().tolist()
    types = {type(value) for value in (*again[0].input_ids, again[0].cut)}
    assert types == {int, bool}  # numpy's own would change what is computed from them


def test_what_decides_a_sample_is_in_its_key(
    make_recipe: Make, make_tokenizer: Any, write_jsonl: Write, tmp_path: Path
) -> None:
    talk = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    file = write_jsonl(talk)
    (tmp_path / "chat.jinja").write_text(TEMPLATE + "x")

    def key_of(template: str = TEMPLATE, **changes: Any) -> str:
        recipe = make_recipe(**{"train": file, "format": "messages"} | changes)
        source = open_source(recipe, "train")
        found = key.cache_key(recipe, source, make_tokenizer(template=template), changes.pop("names", None))
        assert found is not None
        return found

    first = key_of()
    assert key_of() == first
    dated = TEMPLATE + "{{ strftime_now('%d') }}"
    keys = [first, key_of(template=TEMPLATE + " "), key_of(max_length=9), key_of(fields={"messages": "messages"})]
    keys += [key_of(chat_template=str(tmp_path / "chat.jinja")), key_of(template=dated)]
    recipe = make_recipe(train=file, format="messages")
    for tokenizer in (make_tokenizer(eos=False, template=TEMPLATE), make_tokenizer(bos=True, template=TEMPLATE)):
        keys.append(str(key.cache_key(recipe, open_source(recipe, "train"), tokenizer, None)))
    about = file.stat()
    file.write_text(file.read_text().replace('"a"', '"c"'))
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))  # of the same size, and said to be as old
    keys.append(key_of())
    assert len(set(keys)) == len(keys)


def test_a_large_file_goes_by_its_state(
    make_recipe: Make, make_tokenizer: Any, write_jsonl: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key, "READ_WHOLE", 0)
    recipe = make_recipe(train=write_jsonl([{"text": "a b"}]))
    keys = set()
    for text in ("a b", "a c"):
        about = Path(recipe.data.train).stat()
        Path(recipe.data.train).write_text(json.dumps({"text": text}))
        os.utime(recipe.data.train, ns=(about.st_atime_ns, about.st_mtime_ns))
        keys.add(key.cache_key(recipe, open_source(recipe, "train"), make_tokenizer(), None))
    assert len(keys) == 2


def test_a_templates_day_is_in_its_key(make_recipe: Make, make_tokenizer: Any, write_jsonl: Write,
                                       monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    recipe = make_recipe(train=write_jsonl([{"messages": []}]), format="messages")
    tokenizer = make_tokenizer(template="{{ strftime_now('%d %b') }}")

    class Tomorrow(key.datetime.date):  # type: ignore[name-defined,misc]
        @classmethod
        def today(cls) -> Any:
            return cls(2099, 1, 1)

    keys = [key.cache_key(recipe, open_source(recipe, "train"), tokenizer, None)]
    monkeypatch.setattr(key.datetime, "date", Tomorrow)
    keys.append(key.cache_key(recipe, open_source(recipe, "train"), tokenizer, None))
    assert keys[0] != keys[1]


@pytest.mark.parametrize("harm", ["cut", "flip", "empty", "other"])
def test_a_damaged_entry_is_made_anew(tmp_path: Path, harm: str) -> None:
    cache.cached(tmp_path, "k", _five)
    entry = tmp_path / "k.arrow"
    whole = entry.read_bytes()
    middle = len(whole) // 2
    harmed = {"cut": whole[:middle], "empty": b"", "other": b"no Arrow at all",
              "flip": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]}  # fmt: skip
    entry.write_bytes(harmed[harm])
    found = cache.cached(tmp_path, "k", _five)
    assert found.came == "made"
    assert len(found.notes) == 1
    assert "is damaged" in found.notes[0]
    assert entry.read_bytes() == whole
    assert not list(tmp_path.glob("*.partial")) + list(tmp_path.glob("*.lock"))


def test_a_folder_that_cannot_be_written_costs_nothing_but_time(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "file").write_text("")
    found = cache.cached(tmp_path / "file" / "below", "k", _five)
    assert found.came == "memory"
    assert found.columns.input_ids(4) == [4, 4]
    assert "samples are not cached" in found.notes[0]

    def full(columns: Any, partial: Path) -> None:
        partial.write_bytes(b"some")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "_write", full)
    found = cache.cached(tmp_path, "k", _five)
    assert found.came == "memory"
    assert "No space left on device" in found.notes[0]
    assert not list(tmp_path.glob("k.*"))


def test_an_error_of_the_data_stays_one(make_recipe: Make, make_tokenizer: Any, write_jsonl: Write,
                                        tmp_path: Path) -> None:  # fmt: skip
    recipe = make_recipe(train=write_jsonl([{"text": "a"}, {"text": 1}]), cache=tmp_path / "kept")
    for _ in range(2):
        with pytest.raises(InputError, match=r"train\.jsonl:2: text: "):
            open_data(recipe, "train", make_tokenizer())
    assert not list((tmp_path / "kept").iterdir())


@pytest.mark.usefixtures("launches")
def test_one_makes_and_the_others_wait(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    with context.Pool(4) as pool:
        came = pool.map(_slowly, [(tmp_path, 0.5)] * 4, chunksize=1)
    assert sorted(came) == ["cache"] * 3 + ["made"]


@pytest.mark.usefixtures("launches")
def test_who_waits_is_told_the_rows_of_the_maker(tmp_path: Path) -> None:
    maker = multiprocessing.get_context("fork").Process(target=_slowly, args=((tmp_path, 60.0),))
    maker.start()
    seen: list[int] = []

    def waiting(rows: int) -> None:
        seen.append(rows)
        if rows:
            maker.kill()

    try:
        _until(lambda: (tmp_path / "begun").exists())  # it has the lock
        assert cache.cached(tmp_path, "k", _five, waiting).came == "made"
    finally:
        maker.kill()
        maker.join()
    assert seen[-1] == 3


@pytest.mark.usefixtures("launches")
def test_a_killed_maker_leaves_nothing_to_wait_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maker = multiprocessing.get_context("fork").Process(target=_slowly, args=((tmp_path, 60.0),))
    maker.start()
    (tmp_path / "k.1.partial").write_bytes(b"half")
    _until(lambda: (tmp_path / "begun").exists())  # it has the lock
    os.kill(maker.pid or 0, signal.SIGKILL)
    maker.join()
    waits: list[float] = []
    monkeypatch.setattr(cache.time, "sleep", waits.append)
    assert cache.cached(tmp_path, "k", _five).came == "made"
    assert waits == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["begun", "k.arrow"]


@pytest.mark.usefixtures("launches")
def test_a_maker_that_stands_still_is_not_waited_for(tmp_path: Path) -> None:
    maker = multiprocessing.get_context("fork").Process(target=_slowly, args=((tmp_path, 60.0),))
    maker.start()
    try:
        _until(lambda: (tmp_path / "begun").exists())  # it has the lock
        os.kill(maker.pid or 0, signal.SIGSTOP)
        found = cache.cached(tmp_path, "k", _five, patience=2.0)
        assert found.came == "memory"
        assert "no heartbeat from the tokenising process for 2 s" in found.notes[0]
    finally:
        maker.kill()
        maker.join()


def test_the_folder_stays_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("old", "used", "k"):
        cache.cached(tmp_path, name, _five)
        os.utime(tmp_path / f"{name}.arrow", (1e9, 1e9))
    cache.cached(tmp_path, "used", _five)
    monkeypatch.setattr(cache, "MOST_BYTES", 2 * (tmp_path / "k.arrow").stat().st_size)
    cache.cached(tmp_path, "new", _five)
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["new", "used"]


def test_small_data_is_not_kept_unless_asked(
    make_recipe: Make, make_tokenizer: Any, write_jsonl: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cache.FOLDER_VARIABLE, str(tmp_path / "kept"))
    recipe = make_recipe(train=write_jsonl([{"text": "a b"}]))
    assert open_data(recipe, "train", make_tokenizer()).came.came == "memory"
    monkeypatch.setattr(opening, "LEAST_BYTES", 0)
    assert open_data(recipe, "train", make_tokenizer()).came.came == "made"
    off = recipe.model_copy(update={"data": recipe.data.model_copy(update={"cache": False})})
    assert open_data(off, "train", make_tokenizer()).came.came == "memory"


def test_a_stream_is_not_kept(make_recipe: Make) -> None:
    recipe = make_recipe(train="x.jsonl", streaming=True, cache="kept")
    with pytest.raises(InputError, match=r"data\.cache: streamed data is tokenised during training"):
        resolve(recipe, "r.yaml", device="cpu")


def _five(alive: Callable[[int], None]) -> Columns:
    columns = Columns.empty()
    for number in range(5):
        columns.append(Example([number, number], [-100, number]))
        alive(number + 1)
    return columns


def _slowly(asked: tuple[Path, float]) -> str:
    folder, seconds = asked

    def make(alive: Callable[[int], None]) -> Columns:
        (folder / "begun").touch()
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            time.sleep(0.02)
            alive(3)
        return _five(alive)

    return cache.cached(folder, "k", make).came


def _until(so: Callable[[], bool]) -> None:
    ends = time.monotonic() + 10
    while not so():
        assert time.monotonic() < ends
        time.sleep(0.02)
