"""Whether the installed packages do what a rule states, read from their source: nothing is imported.

`evidence_table.py` names, for a rule, the package, the file and the text that shows its fact. The linter looks up
the rules that have fired; `toolkit explain` says what came of it.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Literal

from toolkit.linting.installed import installed, installed_before

Standing = Literal["shown", "not shown", "refuted", "not installed"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """Source text that shows a rule's fact.

    ``scope`` is a function, class or ``Class.method`` of the file; empty for the whole file. Runs of whitespace in the
    texts and in the source count as one space.
    """

    package: str
    file: str  # within the package's folder
    scope: str
    shows: tuple[str, ...]  # all of these are in the scope
    refutes: tuple[str, ...] = ()  # where one of these is in the scope, the fact does not hold
    new: bool = False  # the fact came with the text: it does not hold in the versions before that lack it

    @property
    def place(self) -> str:
        """The package's file and scope, as messages name them."""
        return f"{self.file}:{self.scope}" if self.scope else self.file


def standing(code: str, evidence: Evidence) -> Standing:
    """What the installed source says of the rule's fact; `not installed` also where the package has no source here."""
    folder = folder_of(evidence.package)
    if folder is None:
        return "not installed"
    here = standing_in(evidence, folder)
    before = here == "not shown" and evidence.new and _older(evidence.package, _compared(code, evidence.package))
    return "refuted" if before else here


def standing_in(evidence: Evidence, folder: Path) -> Standing:
    """What the source in a package's folder says by itself: `shown`, `not shown` or `refuted`."""
    text = _scope_of(_source(folder / evidence.file), evidence.scope)
    if any(_plain(refuting) in text for refuting in evidence.refutes):
        return "refuted"
    return "shown" if all(_plain(shown) in text for shown in evidence.shows) else "not shown"


def refuted(code: str, evidence: Iterable[Evidence]) -> bool:
    """Whether the installed source says that a fact of the rule does not hold."""
    return any(standing(code, each) == "refuted" for each in evidence)


def doubt(code: str, evidence: Iterable[Evidence]) -> str:
    """What a message adds where the installed source no longer shows the facts; empty where it does."""
    changed = [f"{each.package} {installed(each.package)}" for each in evidence if standing(code, each) == "not shown"]
    if not changed:
        return ""
    return f"; not confirmed: {' and '.join(dict.fromkeys(changed))} differs here from the versions that were checked"


@cache
def folder_of(package: str) -> Path | None:
    """The package's folder. A top-level name is found without importing it."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        return None
    return Path(next(iter(found.submodule_search_locations)))


def described(code: str, evidence: Iterable[Evidence], source: str) -> list[str]:
    """What `toolkit explain CODE` says: a line for each package that the rule is about."""
    evidence = tuple(evidence)
    lines = [_line(code, each) for each in evidence]
    named = {each.package for each in evidence}
    return lines + [_unchecked(*stated) for stated in _stated(source) if stated[0] not in named]


def holds_for(code: str) -> list[str]:
    """Of each package of a rule, the versions compared in which its fact was seen, and those in which it was not."""
    return [text for package in _seen().get(code, {}) if (text := _holds_for(package, _compared(code, package)))]


def _line(code: str, evidence: Evidence) -> str:
    package, version = evidence.package, installed(evidence.package)
    said = {
        "shown": f"checked against {package} {version}'s source ({evidence.place})",
        "not shown": f"not confirmed for {package} {version}: {evidence.place} differs from the versions checked",
        "refuted": f"does not hold for {package} {version} ({evidence.place}): no finding",
        "not installed": f"not checked: {package} is not installed here",
    }[standing(code, evidence)]
    holds = _holds_for(package, _compared(code, package))
    return f"{said}; holds for {holds}" if holds else said


def _holds_for(package: str, compared: dict[str, list[str]]) -> str:
    """Of the versions whose sources were compared, those in which the fact was seen."""
    shown, other = compared["shown"], compared["not_shown"]
    if not shown:
        return ""
    text = f"{package} {shown[0]}" + (f" to {shown[-1]}" if len(shown) > 1 else "")
    return text + (f", not seen in {', '.join(other)}" if other else "")


def _compared(code: str, package: str) -> dict[str, list[str]]:
    return _seen().get(code, {}).get(package, {"shown": [], "not_shown": []})


def _older(package: str, compared: dict[str, list[str]]) -> bool:
    """Whether the installed version is older than the first in which the fact was seen."""
    return bool(compared["shown"]) and installed_before(package, compared["shown"][0]) is not None


def _unchecked(package: str, version: str) -> str:
    here = installed(package)
    beside = f"installed: {here}" if here else "not installed here"
    return f"stated for {package} {version}; {beside}; its source is not checked"


def _stated(source: str) -> list[tuple[str, str]]:
    """Packages and versions that a rule's source names."""
    pairs = re.findall(r"\b(accelerate|transformers|deepspeed|peft|trl|torch) (\d+\.\d+(?:\.\d+)?)", source)
    return list(dict(pairs).items())


@cache
def _seen() -> dict[str, dict[str, dict[str, list[str]]]]:
    return json.loads(files("toolkit.linting.keys").joinpath("evidence.json").read_text(encoding="utf-8"))


@cache
def _source(path: Path) -> str:
    """The file's text; empty where it is not there."""
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _scope_of(source: str, scope: str) -> str:
    """The scope's text with single spaces; empty where the file has no such scope."""
    lines = source.splitlines()
    for name in scope.split(".") if scope else ():
        lines = _block(lines, name)
    return _plain("\n".join(lines))


def _block(lines: list[str], name: str) -> list[str]:
    """The lines of a function or class, by its indentation."""
    head = re.compile(rf"(\s*)(?:async def|def|class) {re.escape(name)}\b")
    for number, line in enumerate(lines):
        match = head.match(line)
        if match:
            block = [line]
            for below in lines[number + 1 :]:
                ends = below.strip() and len(below) - len(below.lstrip()) <= len(match[1])
                if ends and not below.lstrip().startswith((")", "#")):
                    break
                block.append(below)
            return block
    return []


def _plain(text: str) -> str:
    return " ".join(text.split())
