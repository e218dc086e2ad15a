"""What the screen and the page say of the data, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.cells import cell_len

from toolkit.inspection.shown import Shown
from toolkit.inspection.tokens import visible

LINE = 88
"""Cells of a line of places."""


def overview(fields: dict[str, Any]) -> Iterator[str]:
    """What was read, and the tokens of an epoch."""
    first = f"the first {fields['rows_limit']:,} rows of each source: " if fields["rows_limit"] else ""
    rows = "conversations" if fields["format"] == "messages" else "rows"
    became = f" (data.turns: {fields['turns']})" if fields["turns"] else ""
    yield f"{first}{fields['rows']:,} {rows}, {fields['samples']:,} samples per epoch{became}"
    share = fields["supervised"] / fields["tokens"] if fields["tokens"] else 0.0
    yield (
        f"tokens per epoch: {fields['tokens']:,}, of which {fields['supervised']:,} supervised ({share:.1%}); "
        f"and {fields['padding']:,} padding"
    )


def facts(shown: Shown) -> list[str]:
    """What is to say of a sample beside its text."""
    found = [f"{shown.tokens:,} tokens, {shown.supervised:,} supervised"]
    if shown.lost:
        found.append(f"{shown.lost:,} more were cut")
    if shown.repeats is not None:
        found.append(f"repeats {visible(shown.repeats)}")
    return found


def stats(lengths: dict[str, Any]) -> str:
    """One line about lengths."""
    return (
        f"min {lengths['min']:,} · median {lengths['median']:,.0f} · mean {lengths['mean']:,.1f} · "
        f"95 % up to {lengths['p95']:,.0f} · max {lengths['max']:,} tokens, before the cut"
    )


def span(bucket: dict[str, int]) -> str:
    """A range of lengths."""
    return f"{bucket['from']:,}" if bucket["from"] == bucket["to"] else f"{bucket['from']:,}–{bucket['to']:,}"


def findings(fields: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Name, count and places of what a user should look at."""
    if fields["cut"]:
        share = fields["cut_tokens"] / (fields["tokens"] + fields["cut_tokens"])
        yield (
            "cut",
            f"{samples(fields['cut'])} at data.max_length={fields['max_length']}: {fields['cut_tokens']:,} tokens lost "
            f"({share:.1%}), {fields['cut_supervised']:,} of them supervised",
            named(fields["cut_rows"], fields["cut"]),
        )
    else:
        yield "cut", f"none: every sample fits into data.max_length={fields['max_length']}", ""
    if count := fields["unsupervised"]:
        yield "no loss", f"{samples(count)} without a supervised token", named(fields["unsupervised_rows"], count)
    else:
        yield "no loss", "none: every sample has a supervised token", ""
    same, alike = (fields["duplicates"][name] for name in ("identical", "same_text"))
    if not same["samples"] and not alike["samples"]:
        yield "duplicates", "none: no sample has the token ids of an earlier one, or its text", ""
    if same["samples"]:
        yield "duplicates", f"{samples(same['samples'])} with the token ids of an earlier one", _group(same)
    if alike["samples"]:
        text = f"{samples(alike['samples'])} with the text of an earlier one, ignoring case and white space"
        yield "same text", text, _group(alike)
    for one in fields["empty"]:
        yield "empty", f"{one['what']} without words: {one['count']:,}", named(one["rows"], one["count"])
    if not fields["empty"]:
        what = {"messages": "turn", "prompt-completion": "prompt or completion"}.get(fields["format"], "text")
        yield "empty", f"no {what} without words", ""


def _group(same: dict[str, Any]) -> str:
    return named(same["largest"][0], len(same["largest"][0]), " = ")


def samples(count: int) -> str:
    """A number of samples."""
    return f"{count:,} sample" + ("s" if count != 1 else "")


def named(places: Sequence[str], count: int, between: str = ", ", width: int = LINE) -> str:
    """Some of ``count`` places, as many as fit, each file once: ``a.jsonl:3, 7, b.jsonl:1 …``"""
    text = last = ""
    for place in places:
        file, _, line = place.rpartition(":")
        longer = text + (between if text else "") + (line.strip() if file == last else visible(place))
        if text and cell_len(longer) > width - 2:
            return text + " …"
        text, last = longer, file
    return text + (" …" if count > len(places) else "")
