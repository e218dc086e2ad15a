"""Token by token: the pieces are the text, whole characters, and marked as the loss is."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from toolkit.inspection.tokens import Decoder, Piece, spans, visible
from toolkit.tasks.labels import IGNORED

TEXT = "the model é 日本 🎉🎉 gradient\n\n\tof"


@pytest.fixture(scope="module")
def tokenizer(tiny_root: Path):
    return AutoTokenizer.from_pretrained(tiny_root / "tokenizer")


def test_pieces_are_the_text_in_whole_characters(tokenizer) -> None:
    ids = [*tokenizer(TEXT)["input_ids"], tokenizer.eos_token_id]
    pieces = Decoder(tokenizer).pieces(ids, ids, shifted=True)
    assert "".join(piece.text for piece in pieces) == TEXT + "</s>"
    assert [number for piece in pieces for number in piece.ids] == ids
    assert not any("\ufffd" in piece.text for piece in pieces)
    assert [piece.text for piece in pieces if "🎉" in piece.text] == ["🎉", "🎉"]
    assert [piece.text for piece in pieces if piece.special] == ["</s>"]
    assert [piece.supervised for piece in pieces] == [False, *[True] * (len(pieces) - 1)]


def test_half_a_character_before_a_special_token_does_not_swallow_it(tokenizer) -> None:
    half = tokenizer("🎉")["input_ids"][:2]
    ids = [*half, tokenizer.eos_token_id, *tokenizer("the")["input_ids"]]
    pieces = Decoder(tokenizer).pieces(ids, ids, shifted=False)
    assert [(piece.ids, piece.special) for piece in pieces][:2] == [(tuple(half), False), ((ids[2],), True)]
    assert pieces[1].text == "</s>"


def test_supervision_follows_the_labels(tokenizer) -> None:
    ids = tokenizer("the model of a loss")["input_ids"]
    labels = [token if number % 2 else IGNORED for number, token in enumerate(ids)]
    pieces = Decoder(tokenizer).pieces(ids, labels, shifted=True)
    assert [piece.supervised for piece in pieces] == [bool(number % 2) for number in range(len(ids))]
    assert Decoder(tokenizer).pieces(ids, ids, shifted=False)[0].supervised


def test_spans_are_characters_of_the_text() -> None:
    marks = [("ab", False), ("c", True), ("de", True), ("f", False), ("", True), ("g", True)]
    pieces = [Piece(text, (number,), on, False) for number, (text, on) in enumerate(marks)]
    assert spans(pieces) == [[2, 5], [6, 7]]


def test_data_cannot_control_a_terminal() -> None:
    assert visible("a\x1b[31mb\u202ec\x00\u2028d\n\t") == "a\\x1b[31mb\\u202ec\\x00\\u2028d\n\t"
    assert visible("é 日本 🎉") == "é 日本 🎉"
