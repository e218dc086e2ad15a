"""All that `toolkit data` finds: the numbers of a recipe's data, its padding, and the samples that are shown."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from toolkit.data.sources import Which
from toolkit.errors import InputError
from toolkit.inspection.counts import by_source, histogram, lengths_of, places_of, repeated, without_words
from toolkit.inspection.padding import Arrangement, arrangements
from toolkit.inspection.reading import read_data
from toolkit.inspection.shown import ONLY, Only, Shown, shown_samples
from toolkit.model.built import Built
from toolkit.recipe.preflight import problems_of, with_classes
from toolkit.recipe.resolve import Resolved
from toolkit.results import CommandResult
from toolkit.training.preflight import sample_checks, without_model

STREAMED_ROWS = 10_000
"""Rows of each source that are read of a stream, unless --rows is given."""


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
    built = without_model(resolved, tokenizer)
    known = recipe if built is None else with_classes(recipe, _classes(built))
    read = read_data(known, which, tokenizer, limit)
    checks = [] if built is None else sample_checks(resolved, built, tokenizer, read.samples)
    if read.refused:
        checks = [replace(check, place=None) for check in checks]  # rows that are refused make no samples
    names = ("inputs", "targets", "whole", "lost", "supervised")
    inputs, targets, whole, lost, supervised = (read.noted(name) for name in names)
    seen = inputs + targets
    cut = whole > seen
    ways = tuple(arrangements(resolved, inputs, targets, which == "eval"))
    own = next(way for way in ways if way.recipe)
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
        "unsupervised_rows": places_of(read, supervised == 0),
        "cut_rows": places_of(read, cut),
        "lengths": lengths_of(whole) | {"histogram": histogram(whole)},
        "seen_lengths": lengths_of(seen),
        "duplicates": {"identical": repeated(read, "ids"), "same_text": repeated(read, "texts")},
        "empty": without_words(read),
        "sources": by_source(read, supervised),
        "turns": recipe.data.turns if recipe.data.format == "messages" else None,
        "arrangements": [vars(way) | {"padding_share": way.padding_share} for way in ways],
        "refused": [*read.refused, *problems_of(checks, resolved)],
        "unread_columns": read.samples.unread,
        "notes": [*read.notes, *_uncompared(resolved)],
    }
    shown = shown_samples(resolved, read, tokenizer, which, samples, only)
    return Measured(fields | {"shown": [one.as_json() for one in shown]}, shown, ways)


def _classes(built: Built) -> int:
    return int(built.config.get("num_labels") or len(built.config.get("id2label") or ()) or 2)


def _uncompared(resolved: Resolved) -> list[str]:
    if resolved.facts.config is not None:
        return []
    return [f"rows are not compared with the model, whose config is not known: {resolved.facts.why_unknown}"]


def check_asked(samples: int, only: str | None, rows: int | None) -> Only | None:
    """``only``; raises InputError for numbers and names that mean nothing."""
    if samples < 0:
        raise InputError(f"--samples {samples}: must be at least 0")
    if rows is not None and rows < 1:
        raise InputError(f"--rows {rows}: must be at least 1")
    if only is not None and only not in ONLY:
        raise InputError(f"--only {only}: must be one of {', '.join(ONLY)}")
    return next((known for known in ONLY if known == only), None)
