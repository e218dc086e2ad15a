"""Samples for the loader: tokenised once and cached (see cache.py), or tokenised when they are read."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.data.cache import LEAST_BYTES, Outcome, cached, default_folder
from toolkit.data.columns import Columns
from toolkit.data.fields import canonical_row
from toolkit.data.formats import Example, Formatter, label_names, supervised_tokens
from toolkit.data.key import cache_key
from toolkit.data.preflight import no_samples
from toolkit.data.rows import Row
from toolkit.data.sources import Source, Which, open_source
from toolkit.errors import InputError
from toolkit.recipe.schema import Recipe

PEEKED = 100
"""Streamed samples that are checked before training, so that data without supervised tokens is rejected early."""


class MapSamples:
    """Every sample, tokenised when opened or taken from the cache, as 32-bit ids (8 bytes a token) that workers share.

    ``notes``: what a user should be told. ``label_names``: the classes' names where labels are strings. ``came``: where
    the samples are from, and in how many seconds.
    """

    streamed = False

    def __init__(
        self,
        source: Source,
        formatter: Formatter,
        task: str,
        names: list[str] | None,
        cache: Callable[[], tuple[Path, str] | None] = lambda: None,
    ) -> None:
        """``cache``: gives the folder and the key that the samples are kept under; None: nowhere."""
        self.task = task
        self.label_names = names
        self.pad_id = formatter.pad_id

        state = source.state()

        def make(alive: Callable[[], None]) -> Columns:
            columns = Columns.empty()
            for row in source.rows():
                columns.append(formatter.example(row))
                alive()
            if source.state() != state:
                raise InputError.at(None, source.key, f"{source.spec}: changed while it was being read; start again")
            _check(columns, task, source, formatter)
            return columns

        kept = cache()
        if kept is None:
            started = time.perf_counter()
            columns = make(lambda: None)
            self.came = Outcome(columns, "memory", time.perf_counter() - started)
        else:
            self.came = cached(*kept, make)
        self._columns = self.came.columns
        counts = self._columns.supervised(task)
        self.supervised = int(counts.sum())
        cut, without = int(np.count_nonzero(np.asarray(self._columns.cut))), int(np.count_nonzero(counts == 0))
        told = _notes(source.key, len(self), cut, without, formatter.max_length)
        self.notes = [*source.notes, *told, *self.came.notes]

    def __len__(self) -> int:
        return len(self._columns)

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(index)
        labels = self._columns.labels_of(index)
        answer: list[int] | int = labels[0] if self.task == "sequence-classification" else labels
        return Example(self._columns.input_ids(index), answer, bool(self._columns.cut[index]))

    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample, shape (samples,)."""
        return self._columns.lengths()


def _check(columns: Columns, task: str, source: Source, formatter: Formatter) -> None:
    """Raise InputError for data without supervised tokens, before it is cached."""
    if not len(columns):
        raise no_samples(source.key, source.spec)
    if not columns.supervised(task).any():
        raise nothing_supervised(source, f"none of its {len(columns)} samples has", formatter.max_length)


class StreamSamples:
    """Samples that are read on demand, in the same order each time, and tokenised by their reader."""

    streamed = True
    label_names = None

    def __init__(self, source: Source, formatter: Formatter, task: str) -> None:
        self.task = task
        self.pad_id = formatter.pad_id
        self._source, self._formatter = source, formatter
        first = [formatter.example(row) for row in islice(source.rows(), PEEKED)]
        if not first:
            raise no_samples(source.key, source.spec)
        if not any(supervised_tokens(example, task) for example in first):
            raise nothing_supervised(source, f"none of its first {len(first)} samples has", formatter.max_length)
        cut = sum(example.cut for example in first)
        without = sum(not supervised_tokens(example, task) for example in first)
        told = _notes(source.key, len(first), cut, without, formatter.max_length, "the first ")
        self.notes = [*source.notes, *told]

    def rows(self) -> Iterator[tuple[int, Row, dict[str, Any]]]:
        """Number, row and checked fields of each sample, not yet tokenised; InputError at a bad row."""
        for number, row in enumerate(self._source.rows()):
            yield number, row, self._formatter.fields(row)

    def build(self, row: Row, fields: dict[str, Any]) -> Example:
        """Tokenise one sample of ``rows``."""
        return self._formatter.build(row, fields)


Samples = MapSamples | StreamSamples


def open_data(recipe: Recipe, which: Which, tokenizer: Any) -> Samples:
    """The samples of ``data.train`` or ``data.eval``: a MapSamples, or a StreamSamples if ``data.streaming``.

    Raises InputError, with file and line where there is one, for whatever cannot be used, and for data
    without a single supervised token.
    """
    source = open_source(recipe, which)
    names = _label_names(recipe, source) if recipe.model.task == "sequence-classification" else None
    formatter = Formatter(recipe, tokenizer, names)
    if recipe.data.streaming:
        return StreamSamples(source, formatter, recipe.model.task)
    cache = functools.partial(_cache, recipe, source, tokenizer, names)
    return MapSamples(source, formatter, recipe.model.task, names, cache)


def _cache(recipe: Recipe, source: Source, tokenizer: Any, names: list[str] | None) -> tuple[Path, str] | None:
    asked = recipe.data.cache
    if asked is False or (asked is None and source.size < LEAST_BYTES):
        return None
    key = cache_key(recipe, source, tokenizer, names)
    folder = default_folder() if asked is None else Path(asked).expanduser()
    return None if key is None else (folder, key)


def _label_names(recipe: Recipe, source: Source) -> list[str] | None:
    """The names of string labels, from all of data.train: evaluation means the same classes."""
    train = source if source.key == "data.train" else open_source(recipe, "train")
    needed = {"label": recipe.data.fields.get("label", "label")}
    if recipe.data.streaming:
        first = next(train.rows(), None)
        if first is not None and isinstance(canonical_row(first, needed)["label"], str):
            raise first.error(
                needed["label"],
                "string labels must all be read first to number them; "
                "with data.streaming, use integer labels (or set data.streaming: false)",
            )
        return None
    return label_names({canonical_row(row, needed)["label"] for row in train.rows()}, train.key)


def _notes(key: str, total: int, cut: int, without: int, max_length: int, first: str = "") -> list[str]:
    notes = []
    if cut:
        notes.append(f"{key}: {cut} of {first}{total} samples were truncated to data.max_length={max_length}")
    if without:
        notes.append(f"{key}: {without} of {first}{total} samples have no supervised token and do not affect training")
    return notes


def nothing_supervised(source: Source, what: str, max_length: int) -> InputError:
    """The error for data without supervised tokens."""
    message = f"{source.spec}: {what} a supervised token"
    hint = f"is the answer truncated by data.max_length={max_length}, or not marked by the chat template?"
    return InputError.at(None, source.key, f"{message}; {hint}")
