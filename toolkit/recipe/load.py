"""Parse a YAML file and command-line overrides into a Recipe, or report all mistakes together."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from toolkit.command_line import OVERRIDE
from toolkit.errors import InputError, Place
from toolkit.layouts import layouts
from toolkit.recipe.adapter_options import adapter_problems
from toolkit.recipe.positions import Document, KeyPath, parse, read
from toolkit.recipe.schema import MeshAxes, Recipe
from toolkit.recipe.yaml_text import dump
from toolkit.rooms import option_named


def load_recipe(file: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read ``file``, apply ``section.key=value`` overrides, validate.

    Raises InputError with file, line and key of every mistake.
    """
    document = read(file)
    if not isinstance(document.value, dict):
        raise InputError.at(Place(file, 1), None, "expected a mapping with the sections model, data, run, ...")
    apply_overrides(document, overrides)
    return validate(document)


def recipe_from(recipe: str | Path | Recipe, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe from a file or from an object, with ``section.key=value`` overrides applied; raises InputError."""
    if not isinstance(recipe, Recipe):
        return load_recipe(recipe, overrides)
    if not overrides:
        return recipe
    document = parse(json.dumps(recipe.model_dump(mode="json", exclude_unset=True)), "recipe")
    apply_overrides(document, overrides)
    return validate(document)


def source_of(recipe: str | Path | Recipe) -> str:
    """The name of a recipe in messages: its file, or «recipe» for an object."""
    return "recipe" if isinstance(recipe, Recipe) else str(recipe)


def recipe_yaml(recipe: Recipe) -> str:
    """A recipe as YAML text, without defaults."""
    return dump(recipe.model_dump(mode="json", exclude_unset=True))


def validate(document: Document) -> Recipe:
    """Check a parsed document against the schema; raises InputError with all its mistakes."""
    try:
        recipe = Recipe.model_validate(document.value)
    except ValidationError as error:
        raise InputError(*(_explain(item, document) for item in error.errors())) from None
    if recipe.adapter is not None and (found := adapter_problems(recipe.adapter)):
        raise InputError(*(f"{document.place(path)}: {'.'.join(path)}: {why}" for path, why in found))
    recipe._places.update({path: str(place) for path, place in document.places.items()})
    return recipe


def recipe_sha256(recipe: Recipe) -> str:
    """SHA-256 of the recipe's values, including defaults: files with the same meaning have the same hash."""
    canonical = json.dumps(recipe.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def apply_overrides(document: Document, overrides: Iterable[str]) -> None:
    """Set ``section.key=value`` in a parsed document, in place. Raises InputError if the text has another form."""
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not all(key.split(".")):
            raise InputError(
                f"{OVERRIDE} {override}: an override has the form section.key=value, for example strategy.name=zero3"
            )
        value = parse(text, f"{OVERRIDE} {override}").value
        path = tuple(key.split("."))
        place = Place(f"{OVERRIDE} {override}")
        target = document.value
        for depth, part in enumerate(path[:-1], start=1):
            inner = target.get(part)
            if not isinstance(inner, dict):
                inner = target[part] = {}
                document.places[path[:depth]] = place
            target = inner
        target[path[-1]] = value
        # Errors below this key refer to the command line, not to the file.
        document.places = {known: at for known, at in document.places.items() if known[: len(path)] != path}
        document.places[path] = place


def _explain(item: ErrorDetails, document: Document) -> str:
    path = _written_path(item["loc"], document.value)
    place = document.place(path)
    key = ".".join(str(part) for part in path)
    match item["type"]:
        case "extra_forbidden":
            message = "unknown key" + did_you_mean(str(path[-1]), _keys_at(path[:-1]))
        case "missing":
            message = "missing" + _hint(path)
        case "literal_error":
            message = f"{item['input']!r} is not {item['ctx']['expected']}" + did_you_mean(
                str(item["input"]), _choices(item["ctx"]["expected"])
            )
        case "value_error":
            message = str(item["ctx"]["error"])
        case "model_type" if not isinstance(item["input"], dict):
            first = next(iter(_keys_at(path)))
            message = f"is a section, not a value (given: {_shown(item['input'])}); did you mean {key}.{first}?"
        case _:
            message = f"{item['msg'][0].lower()}{item['msg'][1:]} (given: {_shown(item['input'])})"
    return f"{place}: {key}: {message}" if key else f"{place}: {message}"


def _shown(value: Any) -> str:
    return type(value).__name__ if isinstance(value, dict | list) else repr(value)


def _written_path(location: tuple[int | str, ...], value: Any) -> KeyPath:
    """Pydantic's location without the names it adds for the members of a union."""
    path: list[str | int] = []
    for index, part in enumerate(location):
        last = index == len(location) - 1
        known = (isinstance(value, dict) and part in value) or (isinstance(value, list) and isinstance(part, int))
        if known:
            path.append(part)
            value = value[part] if isinstance(value, dict) or int(part) < len(value) else None
        elif isinstance(value, dict) and last:
            path.append(part)  # a missing key
    return tuple(path)


def _hint(path: KeyPath) -> str:
    match path:
        case ("model",):
            return "; for example model: {path: HuggingFaceTB/SmolLM2-135M}"
        case ("data",) | ("data", "train"):
            return "; for example data: {train: data/train.jsonl}"
        case _:
            return ""


def _keys_at(path: KeyPath) -> list[str]:
    section: type[BaseModel] = Recipe
    if path[:1] == ("options",):
        option = option_named(str(path[1]))
        return [] if option is None else list(option.keys.model_fields)
    if path == ("strategy", "mesh"):
        return [*MeshAxes.model_fields, *(name for name in layouts() if name not in MeshAxes.model_fields)]
    for part in path:
        if isinstance(part, str):  # a number is a place in a list of sections
            section = next(_sections(section.model_fields[part].annotation))
    return list(section.model_fields)


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections within a type, however deep in unions and lists."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _sections(inner)


def _choices(expected: str) -> list[str]:
    return [word.strip(" '") for word in expected.replace(" or ", ",").split(",")]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``; did you mean x?`` for the nearest known word, else nothing."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""
