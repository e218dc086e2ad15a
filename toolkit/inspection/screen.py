"""The data on a terminal: samples with their supervised tokens marked, then the numbers."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from rich.cells import cell_len

from toolkit.inspection.measure import Inspected
from toolkit.inspection.shown import Shown
from toolkit.inspection.tokens import Piece, visible
from toolkit.inspection.wording import facts, findings, overview, samples, span, stats
from toolkit.terminal import coloured, width

WIDTH = 100
"""Columns of the screen; fewer where the terminal has fewer."""
_HEAD, _TAIL = 160, 100
_BAR = 40
_COLOURS = {"prompt": "", "supervised": "32", "special": "35", "supervised special": "32;4", "soft": "2"}

Run = tuple[str, str]
"""Text, and its kind: a key of ``_COLOURS``."""


def _columns() -> int:
    return min(WIDTH, width())


def show(found: Inspected, source: str, *, full: bool, tokens: bool) -> None:
    """Print to standard output. ``full``: samples from end to end. ``tokens``: with a mark between tokens."""
    out = sys.stdout
    colour = coloured(out)
    for line in screen(found, source, colour=colour, full=full, tokens=tokens):
        out.write(line + "\n")


def screen(found: Inspected, source: str, *, colour: bool, full: bool = False, tokens: bool = False) -> Iterator[str]:
    """The lines of the screen."""
    fields = found.document
    yield from _head(fields)
    if found.shown:
        yield ""
        yield _legend(colour, tokens)
    for shown in found.shown:
        yield from _sample(shown, found.shown, fields, colour, full, tokens)
    if fields["only"] and not found.shown:
        yield f"\nno sample is {_ONLY[fields['only']]}"
    yield ""
    yield from _counts(fields)
    if len(fields["sources"]) > 1:
        yield ""
        yield from _sources(fields)
    yield ""
    yield from _arrangements(fields)
    for one in fields["unread_columns"]:
        text = f"{one['name']} is not read, {one['rows']:,} rows: {one['why']}"
        yield from _wrapped("unread: ", visible(text))
    for note in fields["notes"]:
        yield from _wrapped("note: ", visible(note))
    if fields["refused"]:
        number = len(fields["refused"])
        what = (
            "1 problem that a run would refuse is" if number == 1 else f"{number} problems that a run would refuse are"
        )
        yield f"{what} listed on standard error"
    else:
        yield f"next: toolkit train {source}" if source.endswith((".yaml", ".yml")) else "next: train"


_ONLY = {"cut": "cut", "unsupervised": "without a supervised token", "duplicate": "a duplicate"}


def _head(fields: dict[str, Any]) -> Iterator[str]:
    names = ", ".join(one["source"] for one in fields["sources"])
    yield _fit(f"data  {fields['data']} · {fields['format']} · {names}")
    for line in overview(fields):
        yield from _wrapped("      ", line)


def _legend(colour: bool, tokens: bool) -> str:
    marks = [("prompt", "prompt"), ("supervised", "supervised"), ("</s>", "special")]
    legend = "".join(_written([(text, kind)], colour) + "  " for text, kind in marks)
    return legend.rstrip() + ("  ▏ between tokens" if tokens else "") + "  ↵ line end"


# ---------------------------------------------------------------------- samples


def _sample(
    shown: Shown, every: Sequence[Shown], fields: dict[str, Any], colour: bool, full: bool, tokens: bool
) -> Iterator[str]:
    first = next(one for one in every if one.packed == shown.packed) is shown
    yield ""
    if shown.packed is not None and first:
        row = [one for one in every if one.packed == shown.packed]
        held = sum(one.tokens for one in row)
        yield f"packed row {shown.packed}: {samples(len(row))}, {held:,} of {fields['max_length']:,} tokens"
    yield _fit(f"sample {shown.number:,} · {visible(shown.row)} · {', '.join(facts(shown))}")
    yield from _text(shown.pieces, colour, full, tokens)
    if shown.target:
        yield "  target"
        yield from _text(shown.target, colour, full, tokens)
    if shown.label is not None:
        yield f"  label {visible(shown.label)}"


def _text(pieces: Sequence[Piece], colour: bool, full: bool, tokens: bool) -> Iterator[str]:
    runs: list[Run] = []
    hidden = len(pieces) - _HEAD - _TAIL
    if full or hidden <= 0:
        runs = _runs(pieces, tokens)
    else:
        left_out = (f" … {hidden:,} more tokens, --full shows them … ", "soft")
        runs = [*_runs(pieces[:_HEAD], tokens), left_out, *_runs(pieces[-_TAIL:], tokens)]
    border = _written([("│", "soft")], colour) if colour else "│"
    for line in _lines(_marked(runs) if not colour else runs, _columns() - 4):
        yield f"  {border} {_written(line, colour, marks=False)}"


def _runs(pieces: Sequence[Piece], tokens: bool) -> list[Run]:
    runs: list[Run] = []
    for number, piece in enumerate(pieces):
        if tokens and number:
            runs.append(("▏", "soft"))
        kind = " ".join(name for name, on in (("supervised", piece.supervised), ("special", piece.special)) if on)
        runs.append((visible(piece.text).replace("\t", "⇥   "), kind or "prompt"))
    return runs


def _marked(runs: Sequence[Run]) -> list[Run]:
    """Marks for a screen without colour: «supervised», ‹special›."""
    found: list[Run] = []
    inside = False
    for at, (text, kind) in enumerate(runs):
        learned = kind.startswith("supervised")
        if kind == "soft" and text == "▏" and at + 1 < len(runs):
            learned = inside and runs[at + 1][1].startswith("supervised")
        if learned != inside:
            found.append(("«" if learned else "»", "soft"))
            inside = learned
        found.append((f"‹{text}›" if kind.endswith("special") else text, kind))
    return [*found, *([("»", "soft")] if inside else [])]


def _lines(runs: Sequence[Run], width: int) -> Iterator[list[Run]]:
    """``runs`` in lines of at most ``width`` cells, broken at spaces where there are any."""
    line: list[Run] = []
    used = 0
    for text, kind in runs:
        parts = text.split("\n")
        for number, part in enumerate(parts):
            if number:
                line.append(("↵", kind))
                yield line
                line, used = [], 0
            while part:
                room = width - used - 1  # the last cell is for the mark of a line end
                if used and kind.endswith("special") and room < cell_len(part) < width:
                    yield line
                    line, used = [], 0
                    continue
                if cell_len(part) <= room:
                    line.append((part, kind))
                    used += cell_len(part)
                    break
                at = _break(part, room)
                if at == 0 and used == 0:
                    at = 1
                if at:
                    line.append((part[:at], kind))
                yield line
                line, used, part = [], 0, part[at:]
    if line:
        yield line


def _break(text: str, room: int) -> int:
    """How many characters of ``text`` go into ``room`` cells, up to a space if there is one."""
    used = fits = 0
    for char in text:
        used += cell_len(char)
        if used > room:
            break
        fits += 1
    space = text.rfind(" ", 0, fits)
    return space + 1 if space > 0 else fits


def _written(runs: Sequence[Run], colour: bool, marks: bool = True) -> str:
    if not colour:
        return "".join(text for text, _ in (_marked(runs) if marks else runs))
    return "".join(f"\x1b[{_COLOURS[kind]}m{text}\x1b[0m" if _COLOURS[kind] else text for text, kind in runs)


# ---------------------------------------------------------------------- numbers


def _counts(fields: dict[str, Any]) -> Iterator[str]:
    yield from _wrapped("lengths     ", stats(fields["lengths"]))
    buckets = fields["lengths"]["histogram"]
    most, names = max(one["samples"] for one in buckets), [span(one) for one in buckets]
    wide = max(map(len, names))
    for name, one in zip(names, buckets, strict=True):
        full, rest = divmod(round(one["samples"] / most * _BAR * 8), 8)
        bar = "█" * full + ("▏▎▍▌▋▊▉"[rest - 1] if rest else "")
        mark = "  ← data.max_length" if one["from"] <= fields["max_length"] <= one["to"] else ""
        yield f"            {name:>{wide}}  {bar:<{_BAR}} {one['samples']:>9,}{mark}"
    for name, text, places in findings(fields):
        yield from _wrapped(f"{name:<11} ", text)
        if places:
            yield f"{'':<11} {places}"


def _sources(fields: dict[str, Any]) -> Iterator[str]:
    rows = [("sources", "rows", "samples", "per epoch", "share", "supervised", "share")]
    rows += [
        (
            visible(one["source"])[-40:],
            f"{one['rows']:,}",
            f"{one['samples']:,}",
            f"{one['samples_per_epoch']:,}",
            f"{one['share_of_samples']:.1%}",
            f"{one['supervised']:,}",
            f"{one['share_of_supervised']:.1%}",
        )
        for one in fields["sources"]
    ]
    yield from _table(rows)


def _arrangements(fields: dict[str, Any]) -> Iterator[str]:
    rows = [("one epoch", "steps", "rows", "computed tokens", "padding", "largest micro-batch")]
    for one in fields["arrangements"]:
        if one["reason"] is None:
            rows.append(
                (
                    one["name"],
                    f"{one['steps']:,}",
                    f"{one['rows']:,}",
                    f"{one['computed_tokens']:,}",
                    f"{one['padding_share']:.1%}",
                    f"{one['largest_micro_batch']:,} tokens" + (" ← recipe" if one["recipe"] else "         "),
                )
            )
    yield from _table(rows)
    for one in fields["arrangements"]:
        if one["reason"] is not None:
            yield from _wrapped(f"{one['name']}: ", f"not possible: {one['reason']}")


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(cell_len(row[at]) for row in rows) for at in range(len(rows[0]))]
    for row in rows:
        first = row[0] + " " * (widths[0] - cell_len(row[0]))
        yield "  ".join(
            [first, *(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))]
        ).rstrip()


def _wrapped(head: str, text: str) -> Iterator[str]:
    """``text`` behind ``head``, its further lines below its first."""
    for number, line in enumerate(textwrap.wrap(text, _columns() - len(head), break_long_words=False)):
        yield (head if number == 0 else " " * len(head)) + line


def _fit(text: str) -> str:
    """``text``, its middle left out where it is longer than a line."""
    if cell_len(text) <= _columns():
        return text
    end = text[-30:]
    kept = _break(text, _columns() - 3 - cell_len(end))
    return f"{text[:kept].rstrip()} … {end.lstrip()}"
