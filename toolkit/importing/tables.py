"""The tools whose files can be imported, by the names that the readers of `toolkit lint` give them."""

from __future__ import annotations

from toolkit.errors import InputError, Place
from toolkit.importing.axolotl import AXOLOTL
from toolkit.importing.llamafactory import LLAMAFACTORY
from toolkit.importing.scripts import SCRIPTS
from toolkit.importing.swift import SWIFT
from toolkit.importing.table import Table
from toolkit.importing.torchtune import TORCHTUNE
from toolkit.importing.trl import TRL
from toolkit.linting.files.tools import BY_ID

TABLES = {table.id: table for table in (AXOLOTL, LLAMAFACTORY, SWIFT, TORCHTUNE, TRL, SCRIPTS)}


def table_for(tool: str, path: str) -> Table:
    """The table of a tool; raises InputError for a tool that is recognised and not imported."""
    found = TABLES.get(tool)
    if found is None:
        known = ", ".join(table.name for table in TABLES.values())
        name = BY_ID[tool].name if tool in BY_ID else tool
        raise InputError.at(Place(path), None, f"a file of {name}, which cannot be imported; can be: {known}")
    return found
