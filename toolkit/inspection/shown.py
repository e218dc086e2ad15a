"""Which samples `toolkit data` shows, and each as the model sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from toolkit.data.formats import Example
from toolkit.data.sources import Which
from toolkit.inspection.padding import first_rows
from toolkit.inspection.reading import Read
from toolkit.inspection.tokens import Decoder, Piece, spans
from toolkit.recipe.resolve import Resolved
from toolkit.tasks import task_of
from toolkit.tasks.labels import IGNORED, Labels, number_of

Only = Literal["cut", "unsupervised", "duplicate"]
ONLY: tuple[Only, ...] = ("cut", "unsupervised", "duplicate")


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


def shown_samples(
    resolved: Resolved, read: Read, tokenizer: Any, which: Which, count: int, only: Only | None
) -> tuple[Shown, ...]:
    """The first ``count`` samples, or rows of packed samples. ``only``: the first of one kind."""
    # A processor of images has no tokenizer; its samples have no tokens.
    decoder, earlier = Decoder(getattr(tokenizer, "tokenizer", tokenizer)), _earlier(read)
    chosen, packed = _chosen(resolved, read, which, count, only)
    return tuple(
        _shown(read, decoder, resolved.recipe.model.task, at, row, earlier[at])
        for at, row in zip(chosen, packed, strict=True)
    )


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
        tuple(decoder.pieces(example.input_ids, labels, shifted=task_of(task).labels is Labels.NEXT)),
        tuple(decoder.pieces(target, target, shifted=False)),
        label,
        whole - tokens,
        None if earlier is None else places[earlier],
        packed,
    )


def _labels(example: Example, task: str, names: Sequence[str] | None) -> tuple[list[int], str | None, list[int]]:
    """Labels under the input, the class or number, and the target."""
    nothing = [IGNORED] * len(example.input_ids)
    if isinstance(example.labels, int):
        if task_of(task).numbers:
            return nothing, f"{number_of(example.labels):.7g}", []
        name = f" ({names[example.labels]})" if names else ""
        return nothing, f"{example.labels}{name}", []
    return (example.labels, None, []) if task_of(task).labels.under_input else (nothing, None, example.labels)
