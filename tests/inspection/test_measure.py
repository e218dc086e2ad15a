"""Counts that can be worked out by hand: a word is a token, and </s> ends a sample."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.test_chat import FORGETFUL, PLAIN, TWO_TURNS
from inspection.conftest import Look
from toolkit.data.formats import Formatter
from toolkit.errors import InputError
from toolkit.inspection.counts import histogram
from toolkit.inspection.measure import check_asked

Write = Callable[..., Path]


def texts(*lines: str) -> list[dict[str, str]]:
    return [{"text": line} for line in lines]


def test_lengths_and_what_is_cut(look: Look, make_tokenizer: Any, write_jsonl: Write) -> None:
    train = write_jsonl(texts("a b c d e f", "a", "a b c", "a b c d", ""))
    found = look(make_tokenizer(), train=train, max_length=4).fields
    # With </s>: 7, 2, 4, 5 and 1 tokens.
    assert {name: found["lengths"][name] for name in ("min", "median", "mean", "max")} == {
        "min": 1, "median": 4, "mean": 19 / 5, "max": 7,
    }  # fmt: skip
    assert found["lengths"]["p95"] == pytest.approx(np.percentile([7, 2, 4, 5, 1], 95))
    assert found["seen_lengths"]["max"] == 4
    assert (found["cut"], found["cut_tokens"], found["cut_supervised"]) == (2, 3 + 1, 3 + 1)
    assert found["cut_rows"] == [f"{train}:1", f"{train}:4"]
    assert (found["samples"], found["tokens"], found["supervised"]) == (5, 4 + 2 + 4 + 4 + 1, 3 + 1 + 3 + 3 + 0)
    assert (found["unsupervised"], found["unsupervised_rows"]) == (1, [f"{train}:5"])
    assert found["empty"] == [{"what": "texts", "count": 1, "rows": [f"{train}:5"]}]
    assert sum(one["samples"] for one in found["lengths"]["histogram"]) == 5


def test_supervised_tokens_behind_the_cut_are_counted_apart(
    look: Look, make_tokenizer: Any, write_jsonl: Write
) -> None:
    rows = [{"prompt": "a b c d", "completion": " e f"}, {"prompt": "a b", "completion": " c d e f"}]
    train = write_jsonl(rows)
    found = look(make_tokenizer(), train=train, format="prompt-completion", max_length=5).fields
    # Both have 7 tokens; 5 stay. The first loses f </s>, the second e f... of which all are supervised.
    assert (found["cut"], found["cut_tokens"], found["cut_supervised"]) == (2, 4, 4)
    found = look(make_tokenizer(), train=train, format="prompt-completion", max_length=3).fields
    assert (found["cut_tokens"], found["cut_supervised"], found["unsupervised"]) == (8, 7, 1)
    assert found["unsupervised_rows"] == [f"{train}:1"]


def test_a_target_is_cut_and_counted_like_an_input(look: Look, make_tokenizer: Any, write_jsonl: Write) -> None:
    train = write_jsonl([{"prompt": "a b", "completion": "c d e f"}, {"prompt": "a", "completion": "b"}])
    found = look(make_tokenizer(), train=train, task="seq2seq-lm", format="prompt-completion", max_length=4)
    # Inputs of 3 and 2 tokens, targets of 5 and 2; one token of a target is cut.
    assert found.fields["lengths"]["max"] == 8
    assert (found.fields["tokens"], found.fields["supervised"]) == (3 + 4 + 2 + 2, 4 + 2)
    assert (found.fields["cut"], found.fields["cut_tokens"], found.fields["cut_supervised"]) == (1, 1, 1)
    assert ["".join(piece.text for piece in one.target) for one in found.shown] == ["c d e f", "b</s>"]
    assert not any(piece.supervised for piece in found.shown[0].pieces)
    assert all(piece.supervised for piece in found.shown[0].target)


def test_duplicates_by_tokens_and_by_text(look: Look, make_tokenizer: Any, write_jsonl: Write) -> None:
    # «zz» and «yy» are both <unk>: the same tokens of different texts.
    lines = ["a b", "c", "a  b ", "A b", "a b", "zz", "yy", "d"]
    train = write_jsonl(texts(*lines))
    found = look(make_tokenizer(), train=train, only="duplicate", samples=9)
    same, alike = found.fields["duplicates"]["identical"], found.fields["duplicates"]["same_text"]
    assert (same["samples"], same["groups"]) == (3, 2)
    assert same["largest"] == [[f"{train}:1", f"{train}:3", f"{train}:5"], [f"{train}:6", f"{train}:7"]]
    assert (alike["samples"], alike["groups"]) == (3, 1)
    assert alike["largest"] == [[f"{train}:{line}" for line in (1, 3, 4, 5)]]
    assert [(one.number, one.repeats) for one in found.shown] == [
        (3, f"{train}:1"), (4, f"{train}:1"), (5, f"{train}:1"), (7, f"{train}:6"),
    ]  # fmt: skip


def test_duplicates_of_other_sources_count_and_repetitions_of_a_mixture_do_not(
    look: Look, make_tokenizer: Any, write_jsonl: Write
) -> None:
    one, two = write_jsonl(texts("a", "b"), "one.jsonl"), write_jsonl(texts("b", "c"), "two.jsonl")
    sources = [{"path": str(one), "weight": 3}, {"path": str(two)}]
    found = look(make_tokenizer(), train=sources).fields
    assert found["samples"] == 8
    assert found["duplicates"]["identical"]["largest"] == [[f"{one}:2", f"{two}:1"]]
    assert found["duplicates"]["identical"]["samples"] == 1


def test_the_same_prompt_with_another_target_is_no_duplicate(
    look: Look, make_tokenizer: Any, write_jsonl: Write
) -> None:
    train = write_jsonl([{"prompt": "a", "completion": " b"}, {"prompt": "a", "completion": " c"}])
    for task in ("seq2seq-lm", "causal-lm"):
        found = look(make_tokenizer(), train=train, task=task, format="prompt-completion").fields
        assert found["duplicates"]["identical"]["samples"] == found["duplicates"]["same_text"]["samples"] == 0


CALL = {"type": "function", "id": "call12345", "function": {"name": "a", "arguments": {}}}


def test_turns_without_words(look: Look, make_tokenizer: Any, write_jsonl: Write) -> None:
    def turns(*contents: str) -> dict[str, Any]:
        roles = ("user", "assistant")
        return {"messages": [{"role": roles[at % 2], "content": text} for at, text in enumerate(contents)]}

    train = write_jsonl([turns("a", "b"), turns(" ", "b", "\n", "c"), turns("a", "", "b", "c"), turns("a", "b")])
    found = look(make_tokenizer(template=PLAIN), train=train, format="messages").fields
    assert found["empty"] == [
        {"what": "assistant turns", "count": 1, "rows": [f"{train}:3"]},
        {"what": "user turns", "count": 2, "rows": [f"{train}:2", f"{train}:2"]},
    ]
    pairs = [{"prompt": " ", "completion": " "}, {"prompt": "a", "completion": "b"}]
    train = write_jsonl(pairs)
    found = look(make_tokenizer(), train=train, format="prompt-completion").fields
    assert [(one["what"], one["count"]) for one in found["empty"]] == [("completions", 1), ("prompts", 1)]


def test_a_turn_that_calls_a_tool_is_not_empty(look: Look, make_tokenizer: Any, write_jsonl: Write) -> None:
    template = PLAIN.replace(
        "{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}"
    )
    messages = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    train = write_jsonl([{"messages": messages}])
    assert look(make_tokenizer(template=template), train=train, format="messages").fields["empty"] == []


def test_conversations_become_samples(look: Look, make_tokenizer: Any, write_jsonl: Write) -> None:
    train = write_jsonl([{"messages": TWO_TURNS}] * 3)
    found = look(make_tokenizer(eos=False, template=FORGETFUL), train=train, format="messages", samples=2)
    fields = found.fields
    assert (fields["rows"], fields["samples"], fields["turns"]) == (3, 6, "auto")
    assert "6 samples from the first 3 conversations" in " ".join(fields["notes"])
    assert [one.row for one in found.shown] == [f"{train}:1"] * 2
    last = look(make_tokenizer(eos=False, template=FORGETFUL), train=train, format="messages", turns="last")
    assert last.fields["samples"] == 3


def test_what_the_model_sees_is_shown(look: Look, make_tokenizer: Any, write_jsonl: Write) -> None:
    train = write_jsonl([{"messages": TWO_TURNS}, {"messages": TWO_TURNS[:2]}])
    found = look(make_tokenizer(template=PLAIN), train=train, format="messages", samples=1, max_length=12)
    [one] = found.shown
    assert "".join(piece.text for piece in one.pieces if piece.supervised) == "b c<|end|>e"
    assert [piece.text for piece in one.pieces if piece.special] == [
        "<|user|>", "<|end|>", "<|assistant|>", "<|end|>", "<|user|>", "<|end|>", "<|assistant|>",
    ]  # fmt: skip
    assert (one.tokens, one.supervised, one.lost) == (12, 4, 2)
    [shown] = found.fields["shown"]
    assert [shown["text"][start:end] for start, end in shown["spans"]] == ["b c<|end|>", "e"]
    assert shown["row"] == f"{train}:1"


def test_marked_tokens_are_as_many_as_are_counted(look: Look, make_tokenizer: Any, write_jsonl: Write) -> None:
    train = write_jsonl(texts("a b c", "d", ""))
    for options in ({}, {"packing": True}):
        for one in look(make_tokenizer(), train=train, **options).shown:
            assert sum(piece.supervised for piece in one.pieces) == one.supervised
            assert sum(len(piece.ids) for piece in one.pieces) == one.tokens


def test_only_some_are_shown(look: Look, make_tokenizer: Any, write_jsonl: Write) -> None:
    train = write_jsonl(texts("a", "a b c d", "", "b", "a b c d e", "f"))
    shown = {
        only: [one.number for one in look(make_tokenizer(), train=train, max_length=4, only=only, samples=5).shown]
        for only in (None, "cut", "unsupervised", "duplicate")
    }
    # Cut at four tokens, the second and the fifth are the same to the model.
    assert shown == {None: [1, 2, 3, 4, 5], "cut": [2, 5], "unsupervised": [3], "duplicate": [5]}
    assert [one.number for one in look(make_tokenizer(), train=train, max_length=4, only="cut", samples=1).shown] == [2]


def test_packed_rows_are_those_of_the_first_epoch(look: Look, make_tokenizer: Any, write_jsonl: Write) -> None:
    train = write_jsonl(texts("a b c", "d", "e f", "a", "b c d e"))
    found = look(make_tokenizer(), train=train, packing=True, max_length=6, samples=2, shuffle=False)
    # Of 4, 2, 3, 2 and 5 tokens, rows of 6: [5], [4, 2], [3, 2].
    assert [(one.packed, one.number) for one in found.shown] == [(1, 1), (1, 2), (2, 3), (2, 4)]
    every = look(make_tokenizer(), train=train, packing=True, max_length=6, samples=9).shown
    assert sorted(one.number for one in every) == [1, 2, 3, 4, 5]
    assert max(sum(one.tokens for one in every if one.packed == row) for row in (1, 2, 3)) <= 6


def test_rows_that_a_run_refuses_are_listed_and_the_others_measured(
    look: Look, make_tokenizer: Any, write_jsonl: Write
) -> None:
    train = write_jsonl([{"text": "a b"}, {"text": 3}, {"txt": "c"}, {"text": "d"}])
    found = look(make_tokenizer(), train=train).fields
    assert (found["rows"], found["samples"], found["tokens"]) == (2, 2, 5)
    assert [problem.split(": ")[0] for problem in found["refused"]] == [f"{train}:2", f"{train}:3"]
    with pytest.raises(InputError, match="and 2 more rows") as caught:
        look(make_tokenizer(), train=write_jsonl([{"text": 3}] * 12))
    assert len(caught.value.problems) == 11


def test_data_that_trains_nothing_is_shown_and_refused(look: Look, make_tokenizer: Any, write_jsonl: Write) -> None:
    train = write_jsonl([{"prompt": "a b c", "completion": " d"}])
    found = look(make_tokenizer(), train=train, format="prompt-completion", max_length=3)
    assert (found.fields["unsupervised"], len(found.shown)) == (1, 1)
    assert "none of its 1 samples has a supervised token" in found.fields["refused"][0]


def test_a_stream_is_read_as_far_as_asked(look: Look, make_tokenizer: Any, write_jsonl: Write) -> None:
    train = write_jsonl(texts(*["a b"] * 30))
    assert look(make_tokenizer(), train=train, rows=7).fields["samples"] == 7
    found = look(make_tokenizer(), train=train, streaming=True).fields
    assert (found["samples"], found["rows_limit"]) == (30, 10_000)
    assert look(make_tokenizer(), train=train, streaming=True, rows=5).fields["samples"] == 5


def test_classes_have_their_names(look: Look, make_tokenizer: Any, write_jsonl: Write) -> None:
    train = write_jsonl([{"text": "a", "label": "yes"}, {"text": "b", "label": "no"}])
    found = look(make_tokenizer(), train=train, task="sequence-classification")
    assert [one.label for one in found.shown] == ["1 (yes)", "0 (no)"]
    assert found.fields["supervised"] == 2


def test_every_sample_is_tokenised_once(
    look: Look, make_tokenizer: Any, write_jsonl: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that are cut: the whole command costs what a run costs before its first step."""
    calls = []
    whole = Formatter.whole

    def counted(self: Any, row: Any, fields: Any) -> Any:
        calls.append(row.number)
        return whole(self, row, fields)

    monkeypatch.setattr(Formatter, "whole", counted)
    look(make_tokenizer(), train=write_jsonl(texts(*["a b c d e"] * 20)), max_length=3)
    assert calls == list(range(1, 21))


def test_the_histogram_has_every_sample_once() -> None:
    random = np.random.RandomState(0)
    for lengths in ([5], [1, 1, 1], [0, 100_000], random.lognormal(5, 1.5, 1000).astype(np.int64), np.arange(1, 13)):
        lengths = np.asarray(lengths)
        found = histogram(lengths)
        for one in found:
            assert one["samples"] == ((lengths >= one["from"]) & (lengths <= one["to"])).sum()
        assert sum(one["samples"] for one in found) == len(lengths)
        assert len(found) <= 15
        assert all(left["to"] + 1 == right["from"] for left, right in pairwise(found))


def test_what_is_far_longer_than_the_rest_has_a_range_of_its_own() -> None:
    found = histogram(np.asarray([*range(60, 130), 9000]))
    assert (found[-1]["to"], found[-1]["samples"]) == (9000, 1)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ((-1, None, None), "--samples -1"),
        ((3, "long", None), "--only long: must be one of cut"),
        ((3, None, 0), "--rows 0"),
    ],
)
def test_what_means_nothing_is_refused(asked: tuple, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_asked(*asked)
