"""Rows of the recipe's data: local files or a hub data set; all at once or streamed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from toolkit.data.fields import needed_fields
from toolkit.data.files import local_files
from toolkit.data.rows import Row, read_rows
from toolkit.errors import InputError
from toolkit.recipe.schema import Recipe

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

    def state(self) -> list[tuple[int, int]]:
        """A fingerprint that changes if a file is written while it is read."""
        return [(about.st_size, about.st_mtime_ns) for about in (file.stat() for file in self.files)]


def open_source(recipe: Recipe, which: Which) -> Source:
    """The rows of ``data.train`` or ``data.eval``; raises InputError if there is nothing to read.

    A hub data set is ``org/name``, ``org/name:split`` or ``org/name:config:split``; without a split,
    train for training and the first of validation, eval, valid, dev, test for evaluation.
    """
    key = f"data.{which}"
    spec = recipe.data.train if which == "train" else recipe.data.eval
    if spec is None:
        raise InputError.at(None, key, "is not set")
    columns = tuple(needed_fields(recipe).values())
    files = local_files(spec, key)
    if files is None:
        return _hub(spec, key, which, columns, recipe.data.streaming)
    notes: tuple[str, ...] = ()
    if len(files) > 1:
        notes = (f"{key}: {len(files)} files, {files[0].name} to {files[-1].name}",)
    size = sum(file.stat().st_size for file in files)
    return Source(key, spec, lambda: read_rows(files, columns), notes, tuple(files), size=size)


def _hub(spec: str, key: str, which: Which, columns: Sequence[str], streaming: bool) -> Source:
    # Two seconds to import, and only a hub id needs it.
    import datasets

    name, _, rest = spec.partition(":")
    config, _, split = rest.rpartition(":")
    try:
        if not split:
            split = _split(which, datasets.get_dataset_split_names(name, config or None), spec, key)
        data = datasets.load_dataset(name, config or None, split=split, streaming=streaming)
    except InputError:
        raise
    except Exception as error:  # the hub, the network, the files there: each raises its own kind
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError.at(
            None,
            key,
            f"{spec} is neither a local file or folder nor a reachable hub data set ({reason})",
        ) from None
    wanted = list(columns)
    if set(wanted) <= set(data.column_names or ()):
        data = data.select_columns(wanted)

    def rows() -> Iterator[Row]:
        for number, value in enumerate(data, start=1):
            yield Row(dict(value), f"{name} ({split})", number, "row")

    told = (f"{key}: {name}, split {split}, from the hub",)
    size = getattr(data, "size_in_bytes", None) or 0
    return Source(key, spec, rows, told, fingerprint=getattr(data, "_fingerprint", None), size=size)


def _split(which: Which, names: Sequence[Any], spec: str, key: str) -> str:
    wanted = ("train",) if which == "train" else _EVAL_SPLITS
    for name in wanted:
        if name in names:
            return name
    there = ", ".join(map(str, names))
    raise InputError.at(None, key, f"{spec} has the splits {there}; select one: {spec.rstrip(':')}:SPLIT")
