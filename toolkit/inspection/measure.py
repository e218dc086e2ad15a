"""Lengths, duplicates, gaps, shares and padding of a recipe's data, and the first samples as the model sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from toolkit.data.formats import IGNORED, Example
from toolkit.data.sources import Which
from toolkit.errors import InputError
from toolkit.inspection.padding import Arrangement, arrangements, first_rows
from toolkit.inspection.reading import NAMED, Read, read_data
from toolkit.inspection.tokens import Decoder, Piece, spans
from toolkit.recipe.resolve import Resolved
from toolkit.results import CommandResult

Only = Literal["cut", "unsupervised", "duplicate"]
ONLY: tuple[Only, ...] = ("cut", "unsupervised", "duplicate")
STREAMED_ROWS = 10_000
"""Rows of each source that are read of a stream, unless told otherwise."""
_BUCKETS = 12


@dataclass(frozen=True)
class Shown:
    """One sample as the model sees it.

    ``number``: of the samples of all sources, from 1. ``packed``: the row of packed samples that it is in, from 1.
    ``target``: what a sequence-to-sequence model learns to write. ``label``: a class.
    """

    number: int
    row: str
    tokens: int
    supervised: int
    pieces: tuple[Piece, ...]
    target: tuple[Piece, ...] = ()
    label: str | None = None
    lost: int = 0
    """Tokens behind the cut."""
    repeats: str | None = None
    """The row of an earlier sample that is the same."""
    packed: int | None = None

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "sample": self.number,
            "row": self.row,
            "tokens": self.tokens,
            "supervised": self.supervised,
            "cut_tokens": self.lost,
            "repeats": self.repeats,
            "packed_row": self.packed,
            "label": self.label,
            "text": "".join(piece.text for piece in self.pieces),
            "spans": spans(self.pieces),
            "pieces": [piece.as_json() for piece in self.pieces],
        }
        if self.target:
            found["target"] = "".join(piece.text for piece in self.target)
            found["target_pieces"] = [piece.as_json() for piece in self.target]
        return found


@dataclass(frozen=True)
class Inspected(CommandResult):
    """The result of `toolkit data`."""

    resolved: Resolved
    shown: tuple[Shown, ...]
    """The samples that are shown, token by token."""
    arrangements: tuple[Arrangement, ...]
    """An epoch without packing, with group_by_length and with packing."""

    @property
    def samples(self) -> int:
        """Samples per epoch."""
        return self.document["samples"]

    @property
    def tokens(self) -> int:
        """Tokens per epoch, without padding."""
        return self.document["tokens"]

    @property
    def supervised(self) -> int:
        """Supervised tokens per epoch."""
        return self.document["supervised"]

    @property
    def cut(self) -> int:
        """Samples of an epoch that are truncated to data.max_length."""
        return self.document["cut"]

    @property
    def padding_share(self) -> float:
        """Padding of the recipe's own batches, as a fraction of the computed tokens."""
        return self.document["padding_share"]

    @property
    def refused(self) -> list[str]:
        """Messages about rows that a run would refuse; empty if ``exit_code`` is 0."""
        return self.document["refused"]


@dataclass(frozen=True)
class Measured:
    """The command's own JSON fields, and what the screen shows of them as objects."""

    fields: dict[str, Any]
    shown: tuple[Shown, ...]
    arrangements: tuple[Arrangement, ...]


def measure(
    resolved: Resolved, tokenizer: Any, *, which: Which, samples: int, only: Only | None, rows: int | None
) -> Measured:
    """Read and measure the data. ``samples``: how many to show; ``only``: of these; ``rows``: to read of each source.

    Raises InputError if no row can be used.
    """
    recipe = resolved.recipe
    limit = rows if rows is not None else STREAMED_ROWS if recipe.data.streaming else None
    read = read_data(recipe, which, tokenizer, limit)
    names = ("inputs", "targets", "whole", "lost", "supervised")
    inputs, targets, whole, lost, supervised = (read.noted(name) for name in names)
    seen = inputs + targets
    cut = whole > seen
    ways = tuple(arrangements(resolved, inputs, targets, which == "eval"))
    own = next(way for way in ways if way.recipe)
    chosen, packed = _chosen(resolved, read, which, samples, only)
    fields = {
        "data": f"data.{which}",
        "format": recipe.data.format,
        "task": recipe.model.task,
        "max_length": recipe.data.max_length,
        "rows": sum(one.rows for one in read.sources),
        "rows_limit": limit,
        "samples": len(seen),
        "tokens": int(seen.sum()),
        "supervised": int(supervised.sum()),
        "padding": own.padding_tokens,
        "padding_share": own.padding_share,
        "steps_per_epoch": own.steps,
        "cut": int(cut.sum()),
        "cut_tokens": int((whole - seen).sum()),
        "cut_supervised": int(lost.sum()),
        "unsupervised": int((supervised == 0).sum()),
        "unsupervised_rows": _places(read, supervised == 0),
        "cut_rows": _places(read, cut),
        "lengths": _lengths(whole) | {"histogram": _histogram(whole)},
        "seen_lengths": _lengths(seen),
        "duplicates": {"identical": _duplicates(read, "ids"), "same_text": _duplicates(read, "texts")},
        "empty": _empty(read),
        "sources": _sources(read, supervised),
        "turns": recipe.data.turns if recipe.data.format == "messages" else None,
        "arrangements": [_arrangement(way) for way in ways],
        "refused": read.refused,
        "notes": read.notes,
    }
    decoder = Decoder(tokenizer)
    earlier = _earlier(read)
    shown = tuple(
        _shown(read, decoder, recipe.model.task, at, row, earlier[at]) for at, row in zip(chosen, packed, strict=True)
    )
    return Measured(fields | {"shown": [one.as_json() for one in shown]}, shown, ways)


def check_asked(samples: int, only: str | None, rows: int | None) -> Only | None:
    """``only``; raises InputError for numbers and names that mean nothing."""
    if samples < 0:
        raise InputError(f"--samples {samples}: must be at least 0")
    if rows is not None and rows < 1:
        raise InputError(f"--rows {rows}: must be at least 1")
    if only is not None and only not in ONLY:
        raise InputError(f"--only {only}: must be one of {', '.join(ONLY)}")
    return next((known for known in ONLY if known == only), None)


# ---------------------------------------------------------------------- counts


def _lengths(lengths: NDArray[np.int64]) -> dict[str, Any]:
    return {
        "min": int(lengths.min()),
        "median": float(np.median(lengths)),
        "mean": float(lengths.mean()),
        "p95": float(np.percentile(lengths, 95)),
        "max": int(lengths.max()),
    }


def _histogram(lengths: NDArray[np.int64]) -> list[dict[str, int]]:
    """Ranges of equal width, a round number; what is far longer than the rest is in the last."""
    top = int(np.percentile(lengths, 97))
    step = _round_up(max(1, top // _BUCKETS))
    last = min(int(lengths.max()) // step, top // step + 1)
    counts = np.bincount(np.minimum(lengths // step, last), minlength=last + 1)
    found = [{"from": at * step, "to": (at + 1) * step - 1, "samples": int(count)} for at, count in enumerate(counts)]
    found[-1]["to"] = max(found[-1]["to"], int(lengths.max()))
    first = next(at for at, bucket in enumerate(found) if bucket["samples"])
    return found[first:]


def _round_up(step: int) -> int:
    """The next of 1, 2, 5, 10, 20, 50, ..."""
    size = 1
    while True:
        for factor in (1, 2, 5):
            if factor * size >= step:
                return factor * size
        size *= 10


def _duplicates(read: Read, name: str) -> dict[str, Any]:
    """Samples that repeat an earlier one, over all sources; how often a mixture uses a sample does not matter."""
    places = read.all("places")
    groups: dict[bytes, list[int]] = {}
    for at, value in enumerate(read.all(name)):
        groups.setdefault(value, []).append(at)
    same = sorted((group for group in groups.values() if len(group) > 1), key=len, reverse=True)
    return {
        "samples": sum(len(group) - 1 for group in same),
        "groups": len(same),
        "largest": [[places[at] for at in group[:NAMED]] for group in same[:NAMED]],
    }


def _empty(read: Read) -> list[dict[str, Any]]:
    found: dict[str, list[str]] = {}
    for one in read.sources:
        for name, places in one.empty.items():
            found.setdefault(name, []).extend(places)
    return [{"what": name, "count": len(places), "rows": places[:NAMED]} for name, places in sorted(found.items())]


def _sources(read: Read, supervised: NDArray[np.int64]) -> list[dict[str, Any]]:
    source, total = read.source_of(), int(supervised.sum())
    found = []
    for number, one in enumerate(read.sources):
        mine = source == number
        count, learned = int(mine.sum()), int(supervised[mine].sum())
        found.append({
            "key": one.key,
            "source": one.spec,
            "rows": one.rows,
            "samples": len(one.places),
            "samples_per_epoch": count,
            "share_of_samples": count / len(source),
            "supervised": learned,
            "share_of_supervised": learned / total if total else 0.0,
        })  # fmt: skip
    return found


def _arrangement(way: Arrangement) -> dict[str, Any]:
    return vars(way) | {"padding_share": way.padding_share}


def _places(read: Read, wanted: NDArray[np.bool_]) -> list[str]:
    places = read.all("places")
    return [places[at] for at in dict.fromkeys(read.which[wanted].tolist())][:NAMED]


# ---------------------------------------------------------------------- samples


def _chosen(
    resolved: Resolved, read: Read, which: Which, count: int, only: Only | None
) -> tuple[list[int], list[int | None]]:
    """Numbers of samples to show, over all sources, and the packed row of each."""
    if only is None and resolved.recipe.data.packing and which == "train":
        rows = first_rows(resolved, read.noted("inputs"), count)
        return (
            [int(read.which[at]) for row in rows for at in row],
            [number for number, row in enumerate(rows, start=1) for _ in row],
        )
    wanted = (list(dict.fromkeys(read.which.tolist())) if only is None else _having(read, only))[:count]
    return wanted, [None] * len(wanted)


def _having(read: Read, only: Only) -> list[int]:
    if only == "duplicate":
        return [at for at, earlier in enumerate(_earlier(read)) if earlier is not None]
    if only == "unsupervised":
        return [at for at, count in enumerate(read.all("supervised")) if not count]
    seen = zip(read.all("whole"), read.all("inputs"), read.all("targets"), strict=True)
    return [at for at, (whole, inputs, targets) in enumerate(seen) if whole > inputs + targets]


def _earlier(read: Read) -> list[int | None]:
    """By sample, the first of those with the same token ids or the same text, if it is another."""
    by_ids: dict[bytes, int] = {}
    by_text: dict[bytes, int] = {}
    found: list[int | None] = []
    for at, (ids, text) in enumerate(zip(read.all("ids"), read.all("texts"), strict=True)):
        first = min(by_ids.setdefault(ids, at), by_text.setdefault(text, at))
        found.append(first if first < at else None)
    return found


def _shown(read: Read, decoder: Decoder, task: str, number: int, packed: int | None, earlier: int | None) -> Shown:
    places = read.all("places")
    whole, supervised = read.all("whole")[number], read.all("supervised")[number]
    example = read.example(number)
    labels, label, target = _labels(example, task, read.label_names)
    tokens = len(example.input_ids) + len(target)
    return Shown(
        number + 1,
        places[number],
        tokens,
        supervised,
        tuple(decoder.pieces(example.input_ids, labels, shifted=task == "causal-lm")),
        tuple(decoder.pieces(target, target, shifted=False)),
        label,
        whole - tokens,
        None if earlier is None else places[earlier],
        packed,
    )


def _labels(example: Example, task: str, names: Sequence[str] | None) -> tuple[list[int], str | None, list[int]]:
    """Labels under the input, the class, and the target."""
    nothing = [IGNORED] * len(example.input_ids)
    if isinstance(example.labels, int):
        name = f" ({names[example.labels]})" if names else ""
        return nothing, f"{example.labels}{name}", []
    return (example.labels, None, []) if task == "causal-lm" else (nothing, None, example.labels)
