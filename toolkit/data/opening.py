"""From a recipe to its samples: opens each source, names the labels, and decides where tokenised samples are cached."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress, islice
from pathlib import Path
from typing import Any

from toolkit.data.cache import LEAST_BYTES, default_folder
from toolkit.data.fields import canonical_row, needed_fields
from toolkit.data.formats import Formatter, label_names
from toolkit.data.held_out import nothing_held_out, split
from toolkit.data.key import cache_key
from toolkit.data.messages import explained, is_pair
from toolkit.data.mixture import epoch_counts
from toolkit.data.samples import PEEKED, MapSamples, MixedSamples, Samples, StreamSamples
from toolkit.data.sources import Named, Source, Which, named_sources, open_named
from toolkit.errors import InputError
from toolkit.recipe.schema import Recipe
from toolkit.tasks import task_of


def open_data(recipe: Recipe, which: Which, tokenizer: Any) -> Samples:
    """The samples of ``data.train`` or ``data.eval``: a MapSamples, or a StreamSamples if ``data.streaming``.

    Raises InputError, with file and line where there is one, for whatever cannot be used, and for data
    without a single supervised token.
    """
    opened = open_parts(recipe, which, tokenizer)
    if recipe.data.streaming and (which == "train" or len(opened.parts) == 1):
        shares = [one.given.proportion or 0.0 for one in opened.named if one.given is not None] or [1.0]
        return StreamSamples(opened.parts, recipe.model.task, shares)
    return opened.tokenised(lambda one, source: _cache(one.recipe, source, tokenizer, opened.label_names))


@dataclass(frozen=True)
class Opened:
    """The sources of a recipe, with the formatter of each; nothing is tokenised yet."""

    recipe: Recipe
    which: Which
    named: list[Named]
    parts: list[tuple[Source, Formatter]]
    label_names: list[str] | None

    def tokenised(
        self, cache: Callable[[Named, Source], tuple[Path, str] | None], trains: bool = True
    ) -> MapSamples | MixedSamples:
        """All samples. ``cache``: gives the folder and the key that a source is kept under; None: nowhere. ``trains``:
        data without a supervised token is an error."""
        task, names = self.recipe.model.task, self.label_names
        maps = [
            MapSamples(*part, task, names, functools.partial(cache, one, part[0]), trains)
            for part, one in zip(self.parts, self.named, strict=True)
        ]
        if self.which == "eval" and len(maps) > 1:
            return MixedSamples(maps, [len(one) for one in maps], self.recipe.run.seed)
        return maps[0] if self.which == "eval" or self.named[0].given is None else _mixed(self.recipe, self.named, maps)


def open_parts(
    recipe: Recipe, which: Which, tokenizer: Any, make_formatter: Callable[..., Formatter] = Formatter
) -> Opened:
    """Open the sources of ``data.train`` or ``data.eval``; raises InputError like ``open_data``."""
    named = named_sources(recipe, which)
    fraction = recipe.data.eval_fraction
    opened = [_open(one, "train" if fraction is not None else which) for one in named]
    named, sources = [one for one, _ in opened], [source for _, source in opened]
    names = _label_names(recipe, sources, which) if task_of(recipe.model.task).classes else None
    formatters = [make_formatter(one.recipe, tokenizer, names) for one in named]
    if fraction is not None:
        sources = [
            split(source, formatter.unread().read, fraction, which == "eval")
            for source, formatter in zip(sources, formatters, strict=True)
        ]
    if fraction is not None and which == "eval":
        some = [next(source.rows(), None) is not None for source in sources]
        if not any(some):
            raise nothing_held_out(sources, fraction)
        named, sources = list(compress(named, some)), list(compress(sources, some))
        formatters = list(compress(formatters, some))
    parts = [
        (replace(source, notes=(*source.notes, *_conversation_notes(source, formatter))), formatter)
        for source, formatter in zip(sources, formatters, strict=True)
    ]
    return Opened(recipe, which, named, parts, names)


def _mixed(recipe: Recipe, named: Sequence[Named], maps: Sequence[MapSamples]) -> MixedSamples:
    given = [one.given for one in named if one.given is not None]
    counts = epoch_counts([len(one) for one in maps], [one.weight for one in given], [one.proportion for one in given])
    for one, count in zip(named, counts, strict=True):
        if not count:
            raise InputError.at(None, one.key, f"{one.spec}: its share of an epoch is less than one sample")
    return MixedSamples(maps, counts, recipe.run.seed, [one.spec for one in named])


def _conversation_notes(source: Source, formatter: Formatter) -> list[str]:
    """What is done with conversations, as the first rows show it."""
    if "messages" not in formatter.needed:
        return []
    first = list(islice(source.rows(), PEEKED))
    own, names = formatter.needed["messages"], formatter.optional
    notes = list(dict.fromkeys(note for row in first for note in explained(row.value, own, names)))
    notes += formatter.about_turns(first)
    return [f"{source.key}: {note}" for note in notes]


def _open(named: Named, which: Which) -> tuple[Named, Source]:
    """A source, and its recipe: one of messages where prompt and completion are lists of messages."""
    source, recipe = open_named(named, which), named.recipe
    if recipe.data.format != "prompt-completion" or "messages" not in task_of(recipe.model.task).formats:
        return named, source
    needed, first = needed_fields(recipe), next(source.rows(), None)
    if first is None or not is_pair(first.value, needed["prompt"], needed["completion"]):
        return named, source
    data = recipe.data.model_copy(update={"format": "messages"})
    named = replace(named, recipe=recipe.model_copy(update={"data": data}))
    return named, open_named(named, which)


def _cache(recipe: Recipe, source: Source, tokenizer: Any, names: list[str] | None) -> tuple[Path, str] | None:
    asked = recipe.data.cache
    if asked is False or (asked is None and source.size < LEAST_BYTES):
        return None
    key = cache_key(recipe, source, tokenizer, names)
    folder = default_folder() if asked is None else Path(asked).expanduser()
    return None if key is None else (folder, key)


def _label_names(recipe: Recipe, sources: list[Source], which: Which) -> list[str] | None:
    """The names of string labels, from all of data.train: evaluation means the same classes."""
    named = named_sources(recipe, "train")
    opened = sources if which == "train" else [open_named(one, "train") for one in named]
    labels: set[int | str] = set()
    for one, train in zip(named, opened, strict=True):
        labels |= _labels(one.recipe, train)
    return label_names(labels, "data.train")


def _labels(recipe: Recipe, train: Source) -> set[int | str]:
    # Only the labels: whatever else is wrong with a row is reported where it is tokenised.
    fields = {name: own for name, own in needed_fields(recipe).items() if name in ("label", "labels")}
    if recipe.data.streaming:
        first = next(train.rows(), None)
        names = [] if first is None else [one for one in _of(canonical_row(first, fields)) if isinstance(one, str)]
        if first is not None and names:
            raise first.error(
                next(iter(fields.values())),
                "string labels must all be read first to number them; "
                "with data.streaming, use integer labels (or set data.streaming: false)",
            )
        return set()
    return {label for row in train.rows() for label in _of(canonical_row(row, fields))}


def _of(fields: dict[str, Any]) -> list[int | str]:
    return fields["labels"] if "labels" in fields else [fields["label"]]
