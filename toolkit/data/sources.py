"""Rows of the recipe's data: local files or a hub data set; all at once or streamed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from toolkit.data.fields import needed_fields, optional_fields, read_fields
from toolkit.data.files import local_files
from toolkit.data.rows import Fields, Row, left_out, read_rows, row_count
from toolkit.errors import InputError
from toolkit.recipe.hub import use_cache_if_offline
from toolkit.recipe.load import did_you_mean
from toolkit.recipe.schema import DataSource, Recipe

Which = Literal["train", "eval"]
_EVAL_SPLITS = ("validation", "eval", "valid", "dev", "test")


@dataclass(frozen=True)
class Source:
    """Rows that can be read repeatedly in the same order.

    ``key``: the recipe's key (data.train); ``spec``: its value; ``notes``: messages for the user.
    """

    key: str
    spec: str
    rows: Callable[[], Iterator[Row]]
    notes: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()
    fingerprint: str | None = None
    """Of a hub data set: datasets' own hash of what it holds."""
    size: int = 0
    """Bytes on disk, as far as they are known."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Columns that ``rows`` does not have, and in how many rows."""
    count: Callable[[], int | None] = lambda: None
    """Of all rows, also those that ``part`` leaves out; None where it takes as long as reading them."""
    part: tuple[float, bool] | None = None
    """``data.eval_fraction``, and whether these are the rows that it holds out; None: all rows."""

    def state(self) -> list[tuple[int, int]]:
        """A fingerprint that changes if a file is written while it is read."""
        return [(about.st_size, about.st_mtime_ns) for about in (file.stat() for file in self.files)]


@dataclass(frozen=True)
class Named:
    """One source as the recipe names it. ``recipe``: with this source alone as ``data.train``, and with its fields."""

    key: str
    spec: str
    recipe: Recipe
    given: DataSource | None = None


def named_sources(recipe: Recipe, which: Which) -> list[Named]:
    """The sources of ``data.train``, or of all held-out sets, by key; raises InputError where there is none."""
    data = recipe.data
    if which == "train" or data.eval_fraction is not None:
        return _named(recipe, "data.train", data.train)
    if data.eval is None:
        raise InputError.at(None, "data.eval", "is not set")
    sets = data.eval if isinstance(data.eval, dict) else {"": data.eval}
    keys = {name: f"data.eval.{name}" if name else "data.eval" for name in sets}
    return [one for name, spec in sets.items() for one in _named(recipe, keys[name], spec)]


def _named(recipe: Recipe, key: str, spec: str | list[DataSource]) -> list[Named]:
    if isinstance(spec, str):
        return [Named(key, spec, recipe)]
    found = []
    for at, given in enumerate(spec):
        data = recipe.data.model_copy(update={"train": given.path, "fields": recipe.data.fields | given.fields})
        found.append(Named(f"{key}[{at}]", given.path, recipe.model_copy(update={"data": data}), given))
    return found


def held_out_recipes(recipe: Recipe) -> dict[str, Recipe]:
    """A recipe for each held-out set, by name, with that set alone as ``data.eval``; "" is one without a name."""
    sets = recipe.data.eval
    if not isinstance(sets, dict):
        return dict.fromkeys(recipe.data.held_out, recipe)
    return {
        name: recipe.model_copy(update={"data": recipe.data.model_copy(update={"eval": {name: spec}})})
        for name, spec in sets.items()
    }


def open_source(recipe: Recipe, which: Which) -> Source:
    """``open_named`` of a ``data.train`` or ``data.eval`` that is one source."""
    [named] = named_sources(recipe, which)
    return open_named(named, which)


def open_named(named: Named, which: Which) -> Source:
    """The rows of a source; raises InputError where there is nothing to read.

    A hub data set is ``org/name``, ``org/name:split`` or ``org/name:config:split``; without a split,
    train for training and the first of validation, eval, valid, dev, test for evaluation.
    """
    key, spec, recipe, given = named.key, named.spec, named.recipe, named.given
    columns = read_fields(needed_fields(recipe), optional_fields(recipe))
    files = local_files(spec, key)
    if files is None:
        return _hub(spec, key, which, columns, recipe.data.streaming, given)
    check_local(named)
    notes: tuple[str, ...] = ()
    if len(files) > 1:
        notes = (f"{key}: {len(files)} files, {files[0].name} to {files[-1].name}",)
    size = sum(file.stat().st_size for file in files)
    rows, count = partial(read_rows, files, columns), partial(row_count, files)
    return Source(key, spec, rows, notes, tuple(files), size=size, left_out=left_out(files, columns), count=count)


def check_local(named: Named) -> None:
    """Raise InputError where a local source has keys of a hub data set."""
    for option in ("split", "name", "revision"):
        if named.given is not None and getattr(named.given, option) is not None:
            raise InputError.at(
                None, f"{named.key}.{option}", f"only hub data sets have one, and {named.spec} is local"
            )


def _hub(
    spec: str, key: str, which: Which, columns: Fields, streaming: bool, given: DataSource | None = None
) -> Source:
    # Two seconds to import, and only a hub id needs it.
    import datasets
    from datasets.fingerprint import generate_fingerprint

    name, _, rest = spec.partition(":")
    use_cache_if_offline(name)
    config, _, split = rest.rpartition(":")
    options = {"revision": given.revision} if given and given.revision else {}
    if given:
        config, split = given.name or config, given.split or split
    try:
        if not split or given:
            there = datasets.get_dataset_split_names(name, config or None, **options)
            if split and split.partition("[")[0] not in there:
                raise InputError.at(None, f"{key}.split", f"{spec} has the splits {', '.join(map(str, there))}, "
                                    f"not {split}{did_you_mean(split, map(str, there))}")  # fmt: skip
            split = split or _split(which, there, spec, key)
        data = datasets.load_dataset(name, config or None, split=split, streaming=streaming, **options)
    except InputError:
        raise
    except Exception as error:  # the hub, the network, the files there: each raises its own kind
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError.at(
            None,
            key,
            f"{spec} is neither a local file or folder nor a reachable hub data set ({reason})",
        ) from None
    there = list(data.column_names or ())
    not_read: dict[str, int] = {}
    if set(columns.needed) <= set(there):
        rows_of_each = getattr(data, "num_rows", None) or 0  # of a stream it is not known
        not_read = {str(name): rows_of_each for name in there if name not in columns}
        data = data.select_columns([name for name in there if name in columns])

    def rows() -> Iterator[Row]:
        for number, value in enumerate(data, start=1):
            yield Row(dict(value), f"{name} ({split})", number, "row")

    notes = (f"{key}: {name}, split {split}, from the hub",)
    size = getattr(data, "size_in_bytes", None) or 0
    fingerprint = generate_fingerprint(data) if isinstance(data, datasets.Dataset) else None
    count = partial(getattr, data, "num_rows", None)
    return Source(key, spec, rows, notes, fingerprint=fingerprint, size=size, left_out=not_read, count=count)


def _split(which: Which, names: Sequence[Any], spec: str, key: str) -> str:
    wanted = ("train",) if which == "train" else _EVAL_SPLITS
    for name in wanted:
        if name in names:
            return name
    there = ", ".join(map(str, names))
    raise InputError.at(None, key, f"{spec} has the splits {there}; select one: {spec.rstrip(':')}:SPLIT")
