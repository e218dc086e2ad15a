"""Read recipes that earlier versions of the toolkit wrote into checkpoints and run folders.

A new key needs no migration if its default is the earlier behaviour: it is filled in. A key that is removed or renamed,
or whose meaning or default changes, needs one. tests/training/earlier_versions.py keeps a checkpoint of every schema;
add one with each change.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from toolkit.errors import InputError
from toolkit.plugins import VARIABLE
from toolkit.recipe.schema import Recipe

Migration = Callable[[dict[str, Any]], None]
"""Migrates the values of a recipe in place, from one schema version to the next."""

MIGRATIONS: tuple[Migration, ...] = ()
"""The migration at index N reads version N and leaves version N + 1. Add at the end; never change or remove one. A
renamed key, for example: ``lambda values: values["run"].update(seed=values["run"].pop("random_seed"))``."""


def recipe_version(migrations: Sequence[Migration] = MIGRATIONS) -> int:
    """The version written with a recipe today. Files from before versioning have 0."""
    return len(migrations)


def read_earlier(
    values: dict[str, Any], version: int, source: str | Path, migrations: Sequence[Migration] = MIGRATIONS
) -> Recipe:
    """Read a recipe written at ``version`` with the current schema; ``values`` is not changed.

    Raises InputError if a later version of the toolkit wrote it, or if the current schema cannot represent a key.
    """
    known = recipe_version(migrations)
    if version > known:
        raise InputError(
            f"{source}: written by a later version of the toolkit (recipe version {version}, this one reads up to "
            f"{known}); update the toolkit"
        )
    values = json.loads(json.dumps(values))
    try:
        for migration in migrations[version:]:
            migration(values)
        return Recipe.model_validate(values)
    except ValidationError as error:
        found = [f"{'.'.join(map(str, one['loc']))}: {one['msg'][0].lower()}{one['msg'][1:]}" for one in error.errors()]
        instead = "use the version that wrote it, or a later one"
        if any(
            one["loc"][:1] == ("options",) or one["loc"] in _NAMES or one["loc"][:2] == _MESH for one in error.errors()
        ):
            instead = f"if a module of yours or of another package defines it, name that in {VARIABLE}; else {instead}"
        raise InputError(f"{source}: this version cannot read it ({'; '.join(found)}); {instead}") from None


_NAMES = (("strategy", "name"), ("optimizer", "name"))
_MESH = ("strategy", "mesh")
"""Keys whose values other modules may define, as all that is below ``options``, and axes of the mesh."""
