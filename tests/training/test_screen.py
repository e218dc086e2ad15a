"""What a terminal shows while a run reads and evaluates, and that a pipe has nothing of it."""

from __future__ import annotations

import io
import os
import pty
import re
import select
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import pytest

from jobs import resolved_from
from tiny import make_text, recipe_dict
from toolkit.data import reading as data_reading
from toolkit.data.loader import open_data
from toolkit.data.rows import row_count
from toolkit.model.processor import load_tokenizer
from toolkit.training import screen
from toolkit.training.run import run


def on_a_terminal(do: Callable[[TextIO], object]) -> str:
    """What a terminal of 120 columns is sent."""
    own, other = pty.openpty()
    received: list[bytes] = []
    with os.fdopen(other, "w", encoding="utf-8") as stream:
        do(stream)
        stream.flush()
        while select.select([own], [], [], 0)[0]:
            received.append(os.read(own, 65536))
    os.close(own)
    return b"".join(received).decode()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row is told, from the first."""
    monkeypatch.setattr(screen, "_PATIENCE", 0.0)
    monkeypatch.setattr(data_reading, "_EVERY", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")


def test_a_bar_counts_rows_in_one_line_while_they_are_tokenised(tiny_root: Path) -> None:
    resolved = resolved_from(recipe_dict(tiny_root))
    tokenizer = load_tokenizer(resolved.recipe)

    def tokenise(stream: TextIO) -> None:
        with screen.reading(stream):
            open_data(resolved.recipe, "train", tokenizer)

    text = on_a_terminal(tokenise)
    assert re.search(r"tokenising data\.train .*/30 rows", plain(text))
    assert text.count("\n") == 1, "more than one line"
    assert text.endswith("\x1b[1A\x1b[2K"), "the bar stays"
    out = io.StringIO()
    tokenise(out)
    assert out.getvalue() == ""


def test_an_evaluation_moves_beside_the_losses_and_a_pipe_has_lines_alone(tiny_root: Path, tmp_path: Path) -> None:
    recipe = recipe_dict(
        tiny_root, strategy={"name": "single"}, machine={"processes": 1},
        data={"eval": {"near": str(tiny_root / "eval.jsonl")}}, run={"max_steps": 2, "eval_every": 2,
        "sample_prompts": ["the"], "sample_max_new_tokens": 2},
    )  # fmt: skip
    runs = []
    for name in ("terminal", "pipe"):
        (tmp_path / name).mkdir()
        runs.append(resolved_from(recipe | {"run": recipe["run"] | {"output_dir": str(tmp_path / name)}}))
    shown = plain(slowly(lambda: on_a_terminal(lambda out: run(runs[0], resume=False, screen=out))))
    losses = re.findall(r"step 2/2 \S+ (loss \S+)  norm", shown)
    for number in range(5):
        assert re.search(rf"step 2/2 \S+ {re.escape(losses[-1])}  evaluating near {number}/5 ", shown), number
    assert "answering 0/1" in shown
    assert "step 2, near: held-out loss" in shown
    piped = io.StringIO()
    run(runs[1], resume=False, screen=piped)
    for word in ("evaluating", "answering", "tokenising", "\r", "\x1b"):
        assert word not in piped.getvalue()
    assert piped.getvalue().count("step 2, near:") == 1


def slowly(do: Callable[[], str]) -> str:
    """With a terminal that shows every change of the bar, which is drawn ten times a second."""
    with pytest.MonkeyPatch.context() as patch:
        update: Any = screen.Progress.update
        patch.setattr(
            screen.Progress, "update", lambda self, *given, **options: update(self, *given, refresh=True, **options)
        )
        return do()


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_rows_are_counted_without_reading_them(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    make_text(tmp_path / "a.jsonl", 7)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b"]}), tmp_path / "b.parquet")
    assert row_count([tmp_path / "a.jsonl", tmp_path / "b.parquet"]) == 9
    (tmp_path / "c.json").write_text("[]")
    (tmp_path / "d.parquet").write_text("no")
    for other in ("c.json", "d.parquet", "missing.jsonl"):
        assert row_count([tmp_path / "a.jsonl", tmp_path / other]) is None
