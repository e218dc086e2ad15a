"""The list of mutants, and where in the product each of them is."""

from __future__ import annotations

import ast
import hashlib
import itertools
import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

LISTS = Path(__file__).with_name("mutants")
ROOT = Path(__file__).resolve().parents[2]

_TOKEN = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class Mutant:
    """A defect. ``search`` occurs once in ``toolkit/``, whatever its white space; ``file`` is a hint for readers."""

    id: str
    file: str
    search: str
    replace: str
    defect: str
    needs: str = "unit"
    """The kind of test that can find it: ``unit``, or ``group`` for one that trains in worker processes."""
    planted: bool = False
    """Whether the defect was named by somebody who did not know the tests."""

    @cached_property
    def digest(self) -> str:
        """Of the change: a result of another change is none of this mutant."""
        return hashlib.blake2b(f"{self.search}\0{self.replace}".encode(), digest_size=6).hexdigest()

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """``search`` with any white space between its tokens, and with or without a comma before a closing bracket."""
        tokens = _TOKEN.findall(self.search)
        parts = [re.escape(tokens[0])]
        for before, token in itertools.pairwise(tokens):
            both_words = before[-1:].isidentifier() and token[:1].isidentifier()
            comma = "(?:,\\s*)?" if token in ")]}" and before != "," else ""
            parts.append(("\\s+" if both_words else "\\s*") + comma + re.escape(token))
        start = r"(?<!\w)" if tokens[0][:1].isalnum() or tokens[0][:1] == "_" else ""
        return re.compile(start + "".join(parts))


@dataclass(frozen=True)
class Place:
    """Where a mutant's text is: a path below the root of the tree, and its lines, from 1."""

    file: str
    first: int
    last: int


def read_mutants() -> list[Mutant]:
    """All of them, in the order of the files."""
    found = []
    for path in sorted(LISTS.glob("*.toml")):
        found += [Mutant(**entry) for entry in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]]
    return found


def read_sources(root: Path = ROOT) -> dict[str, str]:
    """The product's modules, by path below ``root``."""
    paths = sorted((root / "toolkit").rglob("*.py"))
    return {str(path.relative_to(root)): path.read_text(encoding="utf-8") for path in paths}


def find(mutant: Mutant, sources: Mapping[str, str]) -> list[Place]:
    """Every place of the mutant's text; of a usable mutant there is one."""
    found = []
    words = _words(mutant.search)
    for file, text in sources.items():
        for match in mutant.pattern.finditer(text) if words <= _words(text) else ():
            first = text.count("\n", 0, match.start()) + 1
            found.append(Place(file, first, first + match.group().count("\n")))
    return found


@cache
def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text))


def mutated(mutant: Mutant, text: str) -> str:
    """The text of the mutant's file with the defect."""
    return mutant.pattern.sub(lambda _: mutant.replace, text, count=1)


def problems(mutants: Sequence[Mutant], sources: Mapping[str, str]) -> list[str]:
    """What makes entries of the list useless, in sentences that begin with an id."""
    ids = Counter(mutant.id for mutant in mutants)
    found = [f"{name}: {count} mutants have this id" for name, count in ids.items() if count > 1]
    for mutant in mutants:
        places = find(mutant, sources)
        if len(places) != 1:
            where = ", ".join(f"{place.file}:{place.first}" for place in places[:3])
            where = where or f"it was in toolkit/{mutant.file}"
            found.append(f"{mutant.id}: its text occurs {len(places)} times ({where}): {mutant.search}")
            continue
        if _TOKEN.findall(mutant.search) == _TOKEN.findall(mutant.replace):
            found.append(f"{mutant.id}: the replacement is the same code: {mutant.replace}")
        try:
            ast.parse(mutated(mutant, sources[places[0].file]))
        except SyntaxError as error:
            found.append(f"{mutant.id}: {places[0].file}:{error.lineno}: the replacement does not parse: {error.msg}")
    return found
