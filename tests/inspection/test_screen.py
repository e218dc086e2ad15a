"""The screen and the page: every token marked as it is learned, nothing too wide, nothing that data could break."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from data.test_chat import PLAIN
from inspection.conftest import Resolve
from toolkit.inspection.measure import Inspected, measure
from toolkit.inspection.screen import WIDTH, coloured, screen
from toolkit.inspection.wording import named
from toolkit.report.data_page import data_page

Write = Callable[..., Path]
COLOUR = re.compile(r"\x1b\[[\d;]*m")
NASTY = "a \x1b[31m b \u202e c <script>alert(1)</script> 日本語 " + "d " * 400


@pytest.fixture
def inspected(resolved_of: Resolve) -> Callable[..., Inspected]:
    def make(tokenizer: Any, samples: int = 3, only: Any = None, **data: Any) -> Inspected:
        resolved = resolved_of(**data)
        found = measure(resolved, tokenizer, which="train", samples=samples, only=only, rows=None)
        return Inspected({"only": only, **found.fields}, 0, resolved, found.shown, found.arrangements)

    return make


@pytest.fixture
def chats(write_jsonl: Write) -> Path:
    def turns(question: str, answer: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}

    return write_jsonl([turns("a b", "c d"), turns("e", "f"), turns("a b", "c d"), turns("", "a b c d e f a b c d")])


def written(found: Inspected, **options: Any) -> list[str]:
    return list(screen(found, "r.yaml", **{"colour": False, **options}))


def test_marks_without_colour_are_what_is_learned(inspected: Any, make_tokenizer: Any, chats: Path) -> None:
    found = inspected(make_tokenizer(template=PLAIN), train=chats, format="messages")
    lines = written(found)
    assert not any("\x1b" in line for line in lines)
    assert "  │ ‹<|user|>›a b‹<|end|>›‹<|assistant|>›«c d‹<|end|>›‹</s>›»" in lines
    marked = [re.findall("«(.*?)»", line) for line in lines if line.startswith("  │ ‹<|user|>›")]
    for shown, marks in zip(found.shown, marked, strict=True):
        learned = "".join(piece.text for piece in shown.pieces if piece.supervised)
        assert re.sub("[‹›]", "", "".join(marks)) == learned


def test_colours_are_what_is_learned(inspected: Any, make_tokenizer: Any, chats: Path) -> None:
    found = inspected(make_tokenizer(template=PLAIN), train=chats, format="messages", samples=1)
    [line] = [line for line in written(found, colour=True) if "<|user|>" in line]
    assert COLOUR.sub("", line) == "  │ <|user|>a b<|end|><|assistant|>c d<|end|></s>"
    green = re.findall(r"\x1b\[32(?:;4)?m(.*?)\x1b\[0m", line)
    assert "".join(green) == "c d<|end|></s>"
    special = re.findall(r"\x1b\[35m(.*?)\x1b\[0m", line)
    assert special == ["<|user|>", "<|end|>", "<|assistant|>"]


def test_no_line_is_too_wide_or_controls_the_terminal(inspected: Any, tiny_root: Path, write_jsonl: Write) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_root / "tokenizer")
    train = write_jsonl([{"text": NASTY}, {"text": NASTY + "\n\n\n"}, {"text": "日本語" * 90}, {"text": "x" * 300}])
    for options in ({}, {"packing": True}, {"max_length": 64}):
        found = inspected(tokenizer, train=train, samples=4, **options)
        for look in ({}, {"full": True}, {"tokens": True}, {"colour": True}):
            lines = [COLOUR.sub("", line) for line in written(found, **look)]
            wide = [line for line in lines if cell_len(line) > WIDTH and str(train.parent) not in line]
            assert wide == [], look
            assert not any(char in line for line in lines for char in "\x1b\u202e")
    whole = "".join(line.removeprefix("  │ ") for line in written(inspected(tokenizer, train=train), full=True))
    assert "\\x1b[31m b \\u202e c <script>" in whole
    assert whole.count("d " * 400) == 2


def test_long_samples_are_shortened_in_the_middle(inspected: Any, make_tokenizer: Any, write_jsonl: Write) -> None:
    words = ["a"] * 170 + ["b"] * 300 + ["c"] * 110
    found = inspected(make_tokenizer(), train=write_jsonl([{"text": " ".join(words)}]))
    text = " ".join(written(found))
    assert "321 more tokens, --full shows them" in text
    assert " b " not in text
    assert " b b " in " ".join(written(found, full=True))


def test_packed_rows_have_borders(inspected: Any, make_tokenizer: Any, write_jsonl: Write) -> None:
    train = write_jsonl([{"text": "a b c"}, {"text": "d"}, {"text": "e f"}])
    found = inspected(make_tokenizer(), train=train, packing=True, max_length=6, shuffle=False)
    lines = [line.split(" · ")[0] for line in written(found) if line.startswith(("packed", "sample"))]
    assert lines == ["packed row 1: 2 samples, 6 of 6 tokens", "sample 1", "sample 2",
                     "packed row 2: 1 sample, 3 of 6 tokens", "sample 3"]  # fmt: skip


def test_numbers_are_on_the_screen(inspected: Any, make_tokenizer: Any, chats: Path) -> None:
    found = inspected(make_tokenizer(template=PLAIN), train=chats, format="messages", max_length=9)
    text = "\n".join(written(found))
    fields = found.document
    assert f"{fields['tokens']:,}, of which {fields['supervised']:,} supervised" in text
    assert "1 sample at data.max_length=9: 6 tokens lost" in text
    assert "1 sample with the token ids of an earlier one" in text
    assert "user turns without words: 1" in text
    assert re.search(r"no packing +1 +4 +\d+ +[\d.]+% +\d+ tokens ← recipe", text)
    assert text.endswith("next: toolkit train r.yaml")


def test_nothing_of_a_kind_is_said(inspected: Any, make_tokenizer: Any, write_jsonl: Write) -> None:
    found = inspected(make_tokenizer(), only="cut", train=write_jsonl([{"text": "a"}]))
    assert "no sample is cut" in "\n".join(written(found))
    assert "none: every sample fits" in "\n".join(written(found))


def test_colour_is_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert coloured(Terminal())
    assert not coloured(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not coloured(Terminal())


def test_places_name_each_file_once() -> None:
    assert named(["a.jsonl:1", "a.jsonl:7", "b.jsonl:2"], 3) == "a.jsonl:1, 7, b.jsonl:2"
    assert named(["a.jsonl:1", "a.jsonl:7"], 9, " = ") == "a.jsonl:1 = 7 …"
    assert named(["x (train): row 3", "x (train): row 5"], 2) == "x (train): row 3, row 5"
    assert named([f"{'f' * 30}:{at}{'0' * 30}" for at in range(5)], 5).endswith(" …")


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.learned = ""
        self.text = ""
        self._spans: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "srcset")]
        if tag == "script":
            self.loads.append(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)
        if tag == "span":
            self._spans.append(dict(attrs).get("class") or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag == "span":
            self._spans.pop()

    def handle_data(self, data: str) -> None:
        self.text += data
        if "pre" in self.open and self.open[-1] != "b" and self._spans and "l" in self._spans[-1].split():
            self.learned += data


def read(page: str) -> _Reader:
    reader = _Reader()
    reader.feed(page)
    assert reader.open == []
    return reader


def test_the_page_is_whole_loads_nothing_and_escapes(
    inspected: Any, tiny_root: Path, write_jsonl: Write, make_tokenizer: Any
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_root / "tokenizer")
    train = write_jsonl([{"text": NASTY}, {"text": "a\x00'\"&amp;</pre>"}], "<b>'x'.jsonl")
    for options in ({}, {"packing": True}, {"max_length": 32}, {"train": [{"path": str(train)}] * 2}):
        page = data_page(inspected(tokenizer, **{"train": train, **options}))
        reader = read(page)
        assert reader.loads == []
        assert "@import" not in page
        assert "url(" not in page
        assert not any(char in page for char in "\x00\x1b\u202e")
        assert "<script>alert(1)</script>" in reader.text or "max_length" in options


def test_the_page_marks_what_is_learned(inspected: Any, make_tokenizer: Any, chats: Path) -> None:
    found = inspected(make_tokenizer(template=PLAIN), train=chats, format="messages", max_length=9)
    reader = read(data_page(found))
    learned = "".join(piece.text for shown in found.shown for piece in shown.pieces if piece.supervised)
    assert reader.learned == learned != ""
    for word in ("tokens per epoch", "user turns without words: 1", "group_by_length", "this recipe", "repeats"):
        assert word in reader.text, word


def test_the_page_shows_targets_and_classes(inspected: Any, make_tokenizer: Any, write_jsonl: Write) -> None:
    train = write_jsonl([{"prompt": "a", "completion": "b", "text": "a", "label": "yes"},
                         {"prompt": "c", "completion": "d", "text": "c", "label": "no"}])  # fmt: skip
    found = inspected(make_tokenizer(), train=train, task="seq2seq-lm", format="prompt-completion")
    assert read(data_page(found)).learned == "b</s>d</s>"
    assert "  target" in written(found)
    found = inspected(make_tokenizer(), train=train, task="sequence-classification")
    assert "label 1 (yes)" in read(data_page(found)).text
    assert "  label 1 (yes)" in written(found)
    numbers = write_jsonl([{"text": "a", "label": 0.1}])
    assert "  label 0.1" in written(inspected(make_tokenizer(), train=numbers, task="sequence-regression"))
