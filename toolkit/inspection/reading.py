"""Reads every sample of a recipe's data once, and notes of each what the loader does not keep."""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.data.fields import canonical_row
from toolkit.data.formats import Example, Formatter, supervised_tokens
from toolkit.data.media import content
from toolkit.data.opening import open_parts
from toolkit.data.rows import Row
from toolkit.data.samples import MapSamples, MixedSamples, nothing_supervised
from toolkit.data.sources import Source, Which
from toolkit.errors import InputError
from toolkit.recipe.schema import Recipe
from toolkit.tasks import task_of
from toolkit.tasks.labels import Labels

NAMED = 10
"""Rows that are named for each finding; all are counted."""
_SPACE = re.compile(r"\s+")


@dataclass
class Noted:
    """What is known of the samples of one source, by sample."""

    spec: str
    key: str
    rows: int = 0
    places: list[str] = field(default_factory=list)
    """``file:line`` of each sample's row."""
    whole: array[int] = field(default_factory=lambda: array("q"))
    """Tokens before the cut, of input and target."""
    lost: array[int] = field(default_factory=lambda: array("q"))
    """Supervised tokens behind the cut."""
    targets: array[int] = field(default_factory=lambda: array("q"))
    """Tokens of a sequence-to-sequence model's target, after the cut; 0 for other tasks."""
    inputs: array[int] = field(default_factory=lambda: array("q"))
    supervised: array[int] = field(default_factory=lambda: array("q"))
    ids: list[bytes] = field(default_factory=list)
    """A hash of the token ids."""
    texts: list[bytes] = field(default_factory=list)
    """A hash of the text, in lower case and with single spaces."""
    empty: dict[str, list[str]] = field(default_factory=dict)
    """Places of what has no words, by its name."""
    refused: list[str] = field(default_factory=list)
    """Messages about rows that cannot be used."""


class _Noting(Formatter):
    """The loader's formatter, which also notes what it makes."""

    noted: Noted

    def __init__(self, recipe: Recipe, tokenizer: Any, label_names: list[str] | None = None) -> None:
        super().__init__(recipe, tokenizer, label_names)
        self._task = recipe.model.task
        self._has_target = task_of(self._task).labels is Labels.TARGET

    @property
    def threaded(self) -> bool:
        """Notes are written in row order."""
        return False

    def examples(self, row: Row) -> list[Example]:
        noted = self.noted
        try:
            fields = self.fields(row)
            wholes = [self.whole(row, one) for one in fields]
            for one in wholes:
                self.check(row, self.cut(one), self.main_field)
        except InputError as error:
            noted.refused += error.problems
            return []
        noted.rows += 1
        place = place_of(row)
        for name in self._empty(row):
            noted.empty.setdefault(name, []).append(place)
        return [self._note(place, text_of(one), whole) for one, whole in zip(fields, wholes, strict=True)]

    def _note(self, place: str, text: str, whole: Example) -> Example:
        noted, cut = self.noted, self.cut(whole)
        supervised = supervised_tokens(cut, self._task)
        noted.places.append(place)
        noted.inputs.append(len(cut.input_ids))
        noted.targets.append(self._target(cut))
        noted.whole.append(len(whole.input_ids) + self._target(whole))
        noted.supervised.append(supervised)
        noted.lost.append(supervised_tokens(whole, self._task) - supervised if cut.cut else 0)
        seen = (
            cut.input_ids
            if task_of(self._task).labels is not Labels.TARGET
            else [*cut.input_ids, -1, *_ids(cut.labels)]
        )
        media = b"".join(map(content, cut.media))
        noted.ids.append(_hash(array("q", seen).tobytes() + media))
        noted.texts.append(_hash(_SPACE.sub(" ", text).strip().lower().encode() + media))
        return cut

    def _target(self, example: Example) -> int:
        return len(_ids(example.labels)) if self._has_target else 0

    def _empty(self, row: Row) -> Iterator[str]:
        fields = canonical_row(row, self.needed, self.optional)
        if "messages" not in fields:
            yield from (f"{name}s" for name in ("prompt", "completion", "text") if not fields.get(name, "-").strip())
            return
        for message in fields["messages"]:
            if message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content"):
                continue
            if message["role"] in ("user", "assistant"):
                yield f"{message['role']} turns"


@dataclass(frozen=True)
class Read:
    """All samples of ``data.train`` or ``data.eval``, and what was noted of them.

    ``which``: for each sample of an epoch, its number among those of all sources, int64 of shape (samples,).
    """

    samples: MapSamples | MixedSamples
    sources: list[Noted]
    which: NDArray[np.int64]
    label_names: list[str] | None
    notes: list[str]
    """What a user should know of the sources and of how conversations become samples."""

    def noted(self, name: str) -> NDArray[np.int64]:
        """A number of every sample of an epoch, int64 of shape (samples,)."""
        return np.concatenate([np.asarray(getattr(one, name), dtype=np.int64) for one in self.sources])[self.which]

    def all(self, name: str) -> list[Any]:
        """What was noted of every sample of every source."""
        return [value for one in self.sources for value in getattr(one, name)]

    @property
    def refused(self) -> list[str]:
        return [problem for one in self.sources for problem in one.refused]

    def example(self, number: int) -> Example:
        """A sample by its number among those of all sources."""
        parts = self.samples.parts if isinstance(self.samples, MixedSamples) else [self.samples]
        for part in parts:
            if number < len(part):
                return part[number]
            number -= len(part)
        raise IndexError(number)

    def source_of(self) -> NDArray[np.int64]:
        """The source of every sample of an epoch, int64 of shape (samples,)."""
        sizes = [len(one.places) for one in self.sources]
        return np.repeat(np.arange(len(sizes)), sizes)[self.which]


def read_data(recipe: Recipe, which: Which, tokenizer: Any, most: int | None) -> Read:
    """Tokenise ``data.train`` or ``data.eval`` as the loader does. What a run would refuse is noted, not raised.

    ``most``: rows of each source to read; None: all. Raises InputError if no row can be used.
    """
    opened = open_parts(recipe, which, tokenizer, _Noting)
    sources = []
    for source, formatter in opened.parts:
        assert isinstance(formatter, _Noting)
        formatter.noted = Noted(source.spec, source.key)
        sources.append(formatter.noted)
    parts = [(_first(source, most), formatter) for source, formatter in opened.parts]
    try:
        samples = replace(opened, parts=parts).tokenised(lambda named, source: None, trains=False)
    except InputError as error:
        refused = [problem for one in sources for problem in one.refused]
        if refused:
            raise InputError(*_some(refused)) from None
        raise error from None
    for one, (source, formatter) in zip(sources, opened.parts, strict=True):
        if not any(one.supervised):
            what = f"none of its {len(one.places)} samples has"
            one.refused += nothing_supervised(source, what, formatter.max_length).problems
    starts = np.cumsum([0, *(len(one.places) for one in sources)])[:-1]
    if isinstance(samples, MixedSamples):
        order = starts[samples.part] + samples.index
    else:
        order = np.arange(len(samples), dtype=np.int64)
    notes = [note for source, _ in opened.parts for note in source.notes]
    return Read(samples, sources, order, opened.label_names, notes)


def place_of(row: Row) -> str:
    """Where a row is, as messages name it."""
    return f"{row.file}:{row.number}" if row.unit == "line" else f"{row.file}: {row.unit} {row.number}"


def text_of(fields: dict[str, Any]) -> str:
    """The whole text of a sample."""
    if "piece" in fields:
        return str(fields["piece"].text)
    if "tokens" in fields:
        return " ".join(fields["tokens"])
    return "\n".join(fields[name] for name in ("text", "prompt", "completion") if name in fields)


def _first(source: Source, most: int | None) -> Source:
    return source if most is None else replace(source, rows=lambda: islice(source.rows(), most))


def _some(problems: list[str]) -> list[str]:
    more = len(problems) - NAMED
    return [*problems[:NAMED], *([f"and {more} more rows that cannot be used"] if more > 0 else [])]


def _ids(labels: list[int] | int) -> list[int]:
    return [] if isinstance(labels, int) else labels


def _hash(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
