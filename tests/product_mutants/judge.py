"""Is a mutant found? Runs the tests that run its line, and then the others, in a copy of the tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from product_mutants.catalogue import Mutant, Place, find, read_sources
from product_mutants.covered import Map, guess
from product_mutants.trees import SETS, Ran, Tree

FIRST_S = 240.0
"""Seconds of tests that run before the rest of the set: those that run the mutated line."""
_RETRIES = 20
"""Tests that fail without the mutant, too, or not again with it, are left out. With more there is no verdict."""


@dataclass(frozen=True)
class Result:
    """``verdict``: killed, survived, broken (nothing could be collected) or unfinished (too long)."""

    id: str
    digest: str
    place: str
    set: str
    verdict: str = ""
    by: str = ""
    """The test that fails with the mutant and passes without; or what could not be collected."""
    when: str = ""
    message: str = ""
    tests: int = 0
    """Tests that passed with the mutant."""
    seconds: float = 0.0


class Judge:
    """Judges mutants in one tree, one after another. ``files``: of the set of tests those in these files."""

    def __init__(self, tree: Tree, known: Map | None, name: str, files: Sequence[str], limit_s: float) -> None:
        self.tree, self.known, self.files, self.limit_s = tree, known, list(files), limit_s
        self.selection, self.set = SETS[name], " ".join([name, *files])
        self._passes: dict[str, bool] = {}
        """Of tests that failed with some mutant, whether they pass without. Those that do not are left out."""

    def judge(self, mutant: Mutant) -> Result:
        sources = read_sources(self.tree.folder)
        [place] = find(mutant, sources)
        passed = self.tree.notes / "passed"
        passed.write_text("".join(f"{name}\n" for name, passes in self._passes.items() if not passes), "utf-8")
        result = Result(mutant.id, mutant.digest, f"{place.file}:{place.first}", self.set)
        for named, paths in self._stages(place, sources):
            for _ in range(_RETRIES):
                with self.tree.with_mutant(mutant):
                    arguments = ["-x", f"--passed={passed}", *self.selection, *paths]
                    ran = self.tree.pytest(arguments, max(1.0, self.limit_s - result.seconds), tests=named)
                    again = ran.failed is None or self.tree.pytest([ran.failed["test"]], self.limit_s).status == 1
                seconds = round(result.seconds + ran.seconds, 1)
                result = replace(result, seconds=seconds, tests=result.tests + ran.passed)
                if ran.failed is None or (again and self._passes_without(ran.failed["test"])):
                    break
                with passed.open("a", encoding="utf-8") as file:  # the same stage again, without that test
                    file.write(f"{ran.failed['test']}\n")
            else:
                return replace(result, verdict="broken", by=ran.failed["test"], when="many tests fail without it, too")
            result = _after(result, ran)
            if result.verdict:
                return result
        return replace(result, verdict="survived")

    def _stages(self, place: Place, sources: Mapping[str, str]) -> list[tuple[list[str] | None, list[str]]]:
        """Node ids or files that run first; then everything, without what has passed."""
        everything: tuple[list[str] | None, list[str]] = (None, self.files)
        if self.files:
            return [everything]
        if self.known is not None:
            tests = self.known.tests_of(place, sources[place.file], FIRST_S)
            return [(tests, []), everything] if tests else [everything]
        files = guess(place, self.tree.folder)
        return [(None, files), everything] if files else [everything]

    def _passes_without(self, name: str) -> bool:
        """Whether a test passes in the tree without a mutant."""
        if name not in self._passes:
            self._passes[name] = self.tree.pytest([name], self.limit_s).status == 0
        return self._passes[name]


def _after(result: Result, ran: Ran) -> Result:
    """``result`` with the verdict of a stage; without one where all of its tests pass."""
    if ran.failed is not None:
        by, when, message = (ran.failed[key] for key in ("test", "when", "message"))
        return replace(result, verdict="killed", by=by, when=when, message=message)
    if ran.uncollected is not None:
        message = ran.uncollected["message"]
        return replace(result, verdict="broken", by=ran.uncollected["test"], when="collect", message=message)
    if ran.status is None:
        return replace(result, verdict="unfinished", message=f"after {result.seconds:.0f} s")
    if ran.status not in (0, 5):  # 5: nothing is left to run
        lines = ran.output.strip().splitlines() or [""]
        return replace(result, verdict="broken", when=f"pytest ended with {ran.status}", message=lines[-1][:300])
    return result


def place_of(mutant: Mutant, sources: Mapping[str, str]) -> str:
    """For lists: the module that has the mutant."""
    places = find(mutant, sources)
    return places[0].file.removeprefix("toolkit/") if len(places) == 1 else mutant.file
