"""Checks of a recipe's data before torch, transformers and datasets are imported."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from toolkit.data.fields import canonical_row, needed_fields, optional_fields, read_fields
from toolkit.data.files import NoSuchData, local_files, suffix
from toolkit.data.prompts import prompt_problems
from toolkit.data.rows import read_rows
from toolkit.data.sources import Named, check_local, named_sources
from toolkit.errors import InputError, Place
from toolkit.recipe.example_row import example_row
from toolkit.recipe.schema import Recipe

CHECKED_ROWS = 10_000
"""Rows that are checked before a run starts; the others are checked when they are read, with the same messages."""


def check_data(recipe: Recipe) -> None:
    """Raise InputError with every mistake in ``data`` that shows without a tokenizer or the network.

    Paths, empty and unreadable files, malformed lines, missing and ill-typed fields. What may be a
    hub id is left to the run. At most ``CHECKED_ROWS`` rows of each of train and eval are read.
    """
    needed_fields(recipe)
    named = [*named_sources(recipe, "train"), *(named_sources(recipe, "eval") if recipe.data.eval is not None else [])]
    problems = [*_template_problems(recipe), *prompt_problems(recipe)]
    for one in named:
        try:
            _check_source(one)
        except NoSuchData as error:
            problems.append(f"{error}; expected a row a line, for example {example_row(needed_fields(one.recipe))}")
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(*dict.fromkeys(problems))


def _check_source(named: Named) -> None:
    key, spec = named.key, named.spec
    needed, optional = needed_fields(named.recipe), optional_fields(named.recipe)
    files = local_files(spec, key)
    if files is None:
        return
    check_local(named)
    if any(suffix(file) == ".txt" for file in files) and set(needed) != {"text"}:
        raise InputError.at(None, key, f"a text file has no fields, but this recipe needs {', '.join(needed)}")
    seen = 0
    for row in islice(read_rows(files, read_fields(needed, optional)), CHECKED_ROWS):
        canonical_row(row, needed, optional)
        seen += 1
    if not seen:
        raise no_samples(key, spec)


def no_samples(key: str, spec: str) -> InputError:
    """The error for a data set without a single row."""
    return InputError.at(None, key, f"{spec} has no samples")


def _template_problems(recipe: Recipe) -> list[str]:
    """Keys of conversations in a recipe of another format, which would ignore them; a template that cannot be read."""
    data = recipe.data
    given = {
        "chat_template": data.chat_template is not None,
        "chat_template_kwargs": bool(data.chat_template_kwargs),
        "turns": data.turns != "auto",
    }
    if data.format != "messages":
        return [f"data.{key}: requires data.format: messages; here it is {data.format}" for key in given if given[key]]
    if data.chat_template is not None:
        try:
            read_template(data.chat_template)
        except InputError as error:
            return list(error.problems)
    return []


def read_template(file: str) -> str:
    """The chat template in ``file``; raises InputError if it is not there, not text or blank."""
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise InputError.at(None, "data.chat_template", f"{file} cannot be read: {reason}") from None
    if not text.strip():
        raise InputError.at(Place(file), "data.chat_template", "is empty")
    return text
