"""Samples for the loader: tokenised once (and cached, see cache.py), mixed from several sources, or streamed."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.data.cache import Outcome, cached
from toolkit.data.columns import Columns
from toolkit.data.fingerprint import Fingerprint
from toolkit.data.formats import Example, Formatter, row_without_loss, supervised_tokens
from toolkit.data.held_out import nothing_left
from toolkit.data.media import MediaReader
from toolkit.data.mixture import chosen, interleaved
from toolkit.data.preflight import no_samples
from toolkit.data.reading import counter
from toolkit.data.rows import Row
from toolkit.data.sources import Source
from toolkit.data.threads import ordered_map, thread_count
from toolkit.data.unread import Unread, merged, notes_of
from toolkit.errors import InputError
from toolkit.tasks import task_of
from toolkit.tasks.labels import IGNORED, Labels

PEEKED = 100
"""Streamed samples that are checked before training, so that data without supervised tokens is rejected early."""


class MapSamples:
    """Every sample, tokenised when opened or taken from the cache, as 32-bit ids (8 bytes a token) that workers share.

    ``notes``: what a user should know. ``label_names``: the classes' names where labels are strings. ``came``: where
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
        trains: bool = True,
    ) -> None:
        """``cache``: gives the folder and the key that the samples are kept under; None: nowhere. ``trains``: data
        without a supervised token is an error."""
        self.task = task
        self.label_names = names
        self.pad_id, self.masking, self.reader = formatter.pad_id, formatter.masking, formatter.reader
        self.pooled = formatter.pooled

        state = source.state()

        def make(alive: Callable[[int], None]) -> Columns:
            columns, threads = Columns.empty(), thread_count(alone=kept is not None) if formatter.threaded else 1
            unread, print_ = formatter.unread(), Fingerprint()
            rows = ordered_map(formatter.examples, _seen(source.rows(), unread, print_), threads)
            for number, examples in enumerate(rows, start=1):
                for example in examples:
                    columns.append(example)
                alive(number)
                counted(number)
            if source.state() != state:
                raise InputError.at(None, source.key, f"{source.spec}: changed while it was being read; start again")
            _check(columns, task, source, formatter, trains)
            unread.add_all(source.left_out)
            columns.about = {"unread": unread.to_json(), "notes": formatter.notes(), "rows": print_.to_json()}
            return columns

        kept, counted = cache(), counter(source)
        if kept is None:
            started = time.perf_counter()
            columns = make(lambda rows: None)
            self.came = Outcome(columns, "memory", time.perf_counter() - started)
        else:
            self.came = cached(*kept, make, counted)
        self._columns = self.came.columns
        counts = self._columns.supervised(task)
        self.supervised = int(counts.sum())
        cut, without = int(np.count_nonzero(np.asarray(self._columns.cut))), int(np.count_nonzero(counts == 0))
        notes = _notes(source.key, len(self), cut, without, formatter.max_length)
        self.unread: list[dict[str, Any]] = self._columns.about["unread"]
        self.prints: list[dict[str, Any]] = [self._columns.about["rows"] | {"source": source.spec}]
        self._orders = functools.partial(_orders, source, formatter)
        self._place = functools.partial(_place, source, formatter)
        notes += [f"{source.key}: {note}" for note in self._columns.about["notes"]]
        self.notes = [*source.notes, *notes, *notes_of(source.key, self.unread), *self.came.notes]

    def __getstate__(self) -> dict[str, Any]:
        """For a loader's processes, which read samples; rows are compared by the one that opened them."""
        return {name: value for name, value in vars(self).items() if name not in ("_orders", "_place")}

    def orders(self, number: int, at: set[int]) -> dict[int, str]:
        """The fingerprint of the first so many rows, for each number in ``at``; it reads them again. ``number``: of the
        source, 0 here."""
        return self._orders(at)

    def place(self, index: int) -> str:
        """Where the row of a sample is, for a message: file, line and field. It reads the rows again."""
        return self._place(index)

    def __len__(self) -> int:
        return len(self._columns)

    @property
    def columns(self) -> Columns:
        """All samples as they are kept."""
        return self._columns

    def bare(self, index: int) -> Example:
        """A sample without the features of its images or recordings."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        labels = self._columns.labels_of(index)
        answer: list[int] | int = labels[0] if task_of(self.task).labels is Labels.SAMPLE else labels
        return Example(
            self._columns.input_ids(index), answer, bool(self._columns.cut[index]), self._columns.media_of(index)
        )

    def __getitem__(self, index: int) -> Example:
        return with_features(self.bare(index), self.reader)

    @functools.cached_property
    def blank(self) -> Example | None:
        """A sample without labels, for ranks that have none; None: any tokens do."""
        if self.reader is None:
            return blank_of(self.task, self.pad_id, self.pooled, self.bare(0))
        counts = self._columns.media_counts
        first = next((at for at in range(len(self)) if counts is not None and counts[at] < counts[at + 1]), 0)
        return unlabelled(self[first])

    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample, shape (samples,)."""
        return self._columns.lengths()

    def target_lengths(self) -> NDArray[np.int64] | None:
        """Tokens that a decoder behind an encoder writes for each sample, shape (samples,); None without one."""
        if task_of(self.task).labels is not Labels.TARGET:
            return None
        return np.diff(np.asarray(self._columns.label_ends))

    def counts(self) -> NDArray[np.int64]:
        """Supervised tokens of each sample, shape (samples,)."""
        return self._columns.supervised(self.task)


def _check(columns: Columns, task: str, source: Source, formatter: Formatter, trains: bool) -> None:
    """Raise InputError for data without samples, or without supervised tokens, before it is cached."""
    if not len(columns):
        raise _without_samples(source)
    if trains and not columns.supervised(task).any():
        raise nothing_supervised(source, f"none of its {len(columns)} samples has", formatter.max_length)


class MixedSamples:
    """Several MapSamples as one: an epoch has ``counts`` samples of each, drawn by the seed and without replacement.
    ``specs``: names of the sources, for notes on their shares."""

    streamed = False

    def __init__(
        self, parts: Sequence[MapSamples], counts: Sequence[int], seed: int, specs: Sequence[str] = ()
    ) -> None:
        self.parts = list(parts)
        self.task, self.pad_id, self.label_names = parts[0].task, parts[0].pad_id, parts[0].label_names
        self.masking, self.reader = parts[0].masking, parts[0].reader
        self.part, self.index = chosen([len(part) for part in parts], counts, seed)
        supervised = [part.counts() for part in self.parts]
        self.supervised = int(sum(int(supervised[p][self.index[self.part == p]].sum()) for p in range(len(parts))))
        slowest = max(self.parts, key=lambda part: part.came.seconds).came
        self.came = Outcome(slowest.columns, slowest.came, sum(part.came.seconds for part in self.parts))
        total = sum(counts)
        self.prints = [one for part in parts for one in part.prints]
        self.unread = merged((one["name"], one["rows"], one["why"]) for part in parts for one in part.unread)
        self.notes = [note for part in self.parts for note in part.notes]
        for spec, part, count in zip(specs, parts, counts, strict=False):
            self.notes.append(
                f"data.train: {count:,} of {len(part):,} samples of {spec} in an epoch ({count / total:.1%})"
            )

    def orders(self, number: int, at: set[int]) -> dict[int, str]:
        """As ``MapSamples.orders``, of source ``number``."""
        return self.parts[number].orders(0, at)

    def place(self, index: int) -> str:
        """As ``MapSamples.place``."""
        return self.parts[self.part[index]].place(int(self.index[index]))

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.parts[self.part[index]][int(self.index[index])]

    @property
    def blank(self) -> Example | None:
        """As ``MapSamples.blank``."""
        found = [part.blank for part in self.parts]
        return next((one for one in found if one is not None and one.media), found[0])

    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample, shape (samples,)."""
        return self._of_parts([part.lengths() for part in self.parts])

    def target_lengths(self) -> NDArray[np.int64] | None:
        """As ``MapSamples.target_lengths``."""
        found = [part.target_lengths() for part in self.parts]
        return self._of_parts([one for one in found if one is not None]) if found[0] is not None else None

    def _of_parts(self, values: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
        found = np.empty(len(self), dtype=np.int64)
        for part, value in enumerate(values):
            mine = self.part == part
            found[mine] = value[self.index[mine]]
        return found


class StreamSamples:
    """Samples that are read on demand, in the same order each time, and tokenised by their reader."""

    streamed = True
    label_names = None

    def __init__(self, parts: Sequence[tuple[Source, Formatter]], task: str, shares: Sequence[float] = (1.0,)) -> None:
        """``shares``: by source of ``parts``, its share of the rows, if there are several."""
        self.task = task
        self._parts, self._shares = list(parts), list(shares)
        self.pad_id, self.masking = self._parts[0][1].pad_id, self._parts[0][1].masking
        self.threaded = all(formatter.threaded for _, formatter in self._parts)
        self.unread: list[dict[str, Any]] = []
        self.prints: list[dict[str, Any]] = []
        """Of the first rows of each source."""
        self.notes = [note for source, formatter in self._parts for note in self._look(source, formatter)]

    def _look(self, source: Source, formatter: Formatter) -> list[str]:
        """Read the first rows of a source; raises InputError for data that would train nothing."""
        unread, print_ = formatter.unread(), Fingerprint()
        rows = _seen(islice(source.rows(), PEEKED), unread, print_)
        first = [example for row in rows for example in formatter.examples(row)]
        if not first:
            raise _without_samples(source)
        self.prints.append(print_.to_json() | {"source": source.spec})
        task = self.task
        if not any(supervised_tokens(example, task) for example in first):
            raise nothing_supervised(source, f"none of its first {len(first)} samples has", formatter.max_length)
        cut = sum(example.cut for example in first)
        without = sum(not supervised_tokens(example, task) for example in first)
        notes = _notes(source.key, len(first), cut, without, formatter.max_length, "the first ")
        unread.add_all(source.left_out)
        self.unread = merged((one["name"], one["rows"], one["why"]) for one in (*self.unread, *unread.to_json()))
        notes += [f"{source.key}: {note} (in the first {PEEKED} rows)" for note in formatter.notes()]
        return [*source.notes, *notes, *notes_of(source.key, unread.to_json(), f"of the first {PEEKED} ")]

    def orders(self, number: int, at: set[int]) -> dict[int, str]:
        """As ``MapSamples.orders``, of the first rows of source ``number``."""
        source, formatter = self._parts[number]
        return _orders(replace(source, rows=lambda: islice(source.rows(), PEEKED)), formatter, at)

    def rows(self) -> Iterator[tuple[int, Row, dict[str, Any]]]:
        """Number, row and checked fields of each sample, not yet tokenised; InputError at a bad row."""
        number = 0
        for part, row in interleaved([source.rows for source, _ in self._parts], self._shares):
            for fields in self._parts[part][1].fields(row):
                yield number, row, fields | {"part": part}
                number += 1

    def build(self, row: Row, fields: dict[str, Any]) -> Example:
        """Tokenise one sample of ``rows``."""
        formatter = self._parts[fields["part"]][1]
        return with_features(formatter.build(row, fields), formatter.reader)

    @functools.cached_property
    def blank(self) -> Example | None:
        """As ``MapSamples.blank``."""
        formatter = self._parts[0][1]
        if formatter.reader is None:
            return blank_of(self.task, self.pad_id, formatter.pooled, self._first())
        first = (self.build(row, fields) for _, row, fields in islice(self.rows(), PEEKED))
        return unlabelled(next((one for one in first if one.media), None) or self._first())

    def _first(self) -> Example:
        _, row, fields = next(self.rows())
        return self.build(row, fields)


def _seen(rows: Iterator[Row], unread: Unread, fingerprint: Fingerprint) -> Iterator[Row]:
    """``rows``, with what is not read of them counted, and what is read in the fingerprint."""
    for row in rows:
        unread.add(row)
        fingerprint.add(row.value, unread.read(row.value))
        yield row


def _orders(source: Source, formatter: Formatter, at: set[int]) -> dict[int, str]:
    found, fingerprint = {}, Fingerprint()
    for _ in _seen(islice(source.rows(), max(at, default=0)), formatter.unread(), fingerprint):
        if fingerprint.rows in at:
            found[fingerprint.rows] = fingerprint.at()
    return found


def _place(source: Source, formatter: Formatter, index: int) -> str:
    count = 0
    for row in source.rows():
        with contextlib.suppress(InputError):  # refused where it is read, it makes no sample
            count += len(formatter.fields(row))
        if count > index:
            return str(row.error(formatter.main_field, ""))
    return source.spec


Samples = MapSamples | MixedSamples | StreamSamples


def with_features(example: Example, reader: MediaReader | None) -> Example:
    """The sample with what the processor makes of its images or recordings."""
    if reader is None:
        return example
    return replace(example, features=reader.features(example.media, example.input_ids))


def blank_of(task: str, pad_id: int, pooled: int | None, sample: Example) -> Example | None:
    """A row for ranks without samples, of a model that looks for the token ``pooled`` in each: it has as many of them
    as ``sample``. None for models that look for none."""
    if pooled is None:
        return None
    return row_without_loss(task, pad_id, [pooled] * sample.input_ids.count(pooled))


def unlabelled(example: Example) -> Example:
    """The same input without a label that has a loss."""
    labels = IGNORED if isinstance(example.labels, int) else [IGNORED] * len(example.labels)
    return replace(example, labels=labels)


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


def _without_samples(source: Source) -> InputError:
    return no_samples(source.key, source.spec) if source.part is None or source.part[1] else nothing_left(source)
