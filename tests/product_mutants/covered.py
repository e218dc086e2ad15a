"""Which tests run a line of the product: recorded once with coverage, or guessed from what test files import."""

from __future__ import annotations

import ast
import hashlib
import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from product_mutants.catalogue import ROOT, Place
from product_mutants.contexts import FOLDER_VARIABLE
from product_mutants.trees import Ran, Tree, read_lines

KEPT = 40
"""Tests of a line that the map keeps, the fastest: one that all of them miss is left to the rest of the set."""
FEW = 5
"""With fewer tests of a line those of its module follow: lines that run at import have none."""

_SLOW_S = 900
"""For one test under coverage."""


@dataclass
class Map:
    """``tests``: node ids and seconds. ``lines``: for each file and line, indices of tests, the fastest first."""

    tests: list[tuple[str, float]] = field(default_factory=list)
    lines: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(vars(self), separators=(",", ":")) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Map:
        found = json.loads(path.read_text(encoding="utf-8"))
        lines = {file: {int(line): tests for line, tests in own.items()} for file, own in found["lines"].items()}
        return cls([(name, seconds) for name, seconds in found["tests"]], lines, found["digests"])

    def tests_of(self, place: Place, text: str, most_s: float) -> list[str]:
        """Tests that run a place of a file whose text is ``text``, the fastest first, for ``most_s`` seconds."""
        own = self.lines.get(place.file, {})
        found: Counter[int] = Counter()
        if self.digests.get(place.file) == digest(text):  # else lines have moved
            found.update(test for line in statement_lines(text, place) for test in own.get(line, ()))
        if len(found) < FEW:
            found.update(test for tests in own.values() for test in tests)
        chosen, seconds = [], 0.0
        for test in sorted(found, key=lambda test: self.tests[test][1]):
            name, took = self.tests[test]
            seconds += took
            if chosen and seconds > most_s:
                break
            chosen.append(name)
        return chosen


def record(tree: Tree, selection: tuple[str, ...], limit_s: float) -> tuple[Map, Ran]:
    """Run a set of tests under coverage, worker processes included, in a tree without mutants."""
    folder = tree.notes / "coverage"
    folder.mkdir()
    settings = folder / "coveragerc"
    settings.write_text(
        f"[run]\nsource = {tree.folder / 'toolkit'}\ndata_file = {folder / 'data'}\nparallel = true\n"
        "patch = subprocess, fork, _exit\nplugins = tests.product_mutants.contexts\ndisable_warnings =\n"
        "    no-data-collected\n    module-not-measured\n    dynamic-conflict\n",
        encoding="utf-8",
    )
    python = ("-m", "coverage", "run", f"--rcfile={settings}", "-m", "pytest")
    arguments, more = [f"--contexts={folder}", *selection], {FOLDER_VARIABLE: str(folder)}
    ran = tree.pytest(arguments, limit_s, timeout_s=_SLOW_S, python=python, more=more)
    notes = read_lines(tree.notes / "notes.jsonl")
    numbers = {one["number"]: one["test"] for one in notes if one["when"] == "start"}
    seconds: Counter[str] = Counter()
    for one in notes:
        seconds[one["test"]] += one.get("seconds", 0.0)
    return _joined(tree, folder, numbers, seconds), ran


def _joined(tree: Tree, folder: Path, numbers: dict[int, str], seconds: Counter[str]) -> Map:
    from coverage import CoverageData

    found: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for path in sorted(folder.glob("data.*")):
        data: Any = CoverageData(basename=str(path))
        data.read()
        for file in data.measured_files():
            own = found[str(Path(file).relative_to(tree.folder))]
            for line, contexts in data.contexts_by_lineno(file).items():
                labels = (label.rpartition("|")[2] for label in contexts)
                own[line].update(numbers[int(label)] for label in labels if label)
    tests = sorted(numbers.values(), key=lambda test: seconds[test])
    place = {test: at for at, test in enumerate(tests)}
    lines = {
        file: {line: sorted(place[test] for test in those)[:KEPT] for line, those in sorted(own.items()) if those}
        for file, own in sorted(found.items())
    }
    digests = {file: digest((tree.folder / file).read_text(encoding="utf-8")) for file in lines}
    return Map([(test, round(seconds[test], 3)) for test in tests], lines, digests)


def digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def statement_lines(text: str, place: Place) -> range:
    """Lines of a place, from the beginning of its statement on: coverage knows a statement by its first line."""
    statements = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    starts = [one.lineno for one in statements if one.lineno <= place.first <= (one.end_lineno or one.lineno)]
    return range(max(starts, default=place.first), place.last + 1)


def guess(place: Place, root: Path = ROOT) -> list[str]:
    """Test files that import the module of a place, or a helper in tests/ that does; then those that import its
    package. The smallest first."""
    module = place.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    imports = {path: _imported(path) for path in sorted((root / "tests").rglob("*.py"))}
    direct = {path for path, names in imports.items() if module in names}
    helpers = {_name_in_tests(path, root) for path in direct if not path.name.startswith("test_")}
    through = {path for path, names in imports.items() if any(_ends(name, helpers) for name in names)}
    package = module.rpartition(".")[0]
    near = {path for path, names in imports.items() if any(name.startswith(f"{package}.") for name in names)}
    found: dict[Path, None] = {}
    for paths in (direct, through, near if package != "toolkit" else set()):
        tests = [path for path in paths if path.name.startswith("test_")]
        found |= dict.fromkeys(sorted(tests, key=lambda path: (path.stat().st_size, path)))
    return [str(path.relative_to(root)) for path in found]


def _imported(path: Path) -> set[str]:
    """Modules that a file imports, anywhere in it; of ``from a import b`` both a and a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def _name_in_tests(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root / "tests").with_suffix("").parts)


def _ends(name: str, helpers: set[str]) -> bool:
    return any(name.removeprefix("tests.") == helper or name.rpartition(".")[2] == helper for helper in helpers)
