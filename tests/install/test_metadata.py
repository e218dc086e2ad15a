"""pyproject.toml declares what is imported; its oldest versions are the tried ones."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement

from toolkit.upstream import TESTED

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DECLARED = {re.sub(r"[-_.]+", "-", r.name).lower(): r for r in map(Requirement, PROJECT["dependencies"])}

# Imported where a feature asks for it, and refused by name where it is not installed; trl where the linter's tables of
# known keys are built, from what is installed for development.
OPTIONAL = {"bitsandbytes", "liger-kernel", "pillow", "soundfile", "soxr", "starlette", "trl", "uvicorn"}
# Part of a declared distribution's own promise: pydantic releases pydantic-core with itself, transformers bounds
# tokenizers.
WITH = {"pydantic-core": "pydantic", "tokenizers": "transformers"}


def imported() -> set[str]:
    """The distributions that the sources of the package import, anywhere in a file."""
    names: set[str] = set()
    for file in (ROOT / "toolkit").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.partition(".")[0])
    outside = names - set(sys.stdlib_module_names) - {"toolkit"}
    known = packages_distributions()
    return {re.sub(r"[-_.]+", "-", known.get(name, [name])[0]).lower() for name in outside}


def test_what_is_imported_is_declared_and_what_is_declared_is_imported() -> None:
    found = {WITH.get(name, name) for name in imported()}
    assert found - OPTIONAL == set(DECLARED)


def test_what_people_train_with_is_not_bounded_above() -> None:
    """Whoever installs the newest of these keeps it; `doctor` says that it is newer than what was tested."""
    assert all("<" not in str(DECLARED[name].specifier) for name in TESTED)
    bounded = set(DECLARED) - {*TESTED, "packaging", "jinja2", "pyarrow"}
    assert all("<" in str(DECLARED[name].specifier) for name in bounded)


def test_the_versions_that_doctor_calls_tested_are_those_that_the_tests_use() -> None:
    pinned = pins("constraints.txt")
    assert {name: pinned[name] for name in TESTED} == TESTED


def pins(file: str) -> dict[str, str]:
    lines = (line for line in (ROOT / file).read_text().splitlines() if line and not line.startswith("#"))
    parts = (line.split("==") for line in lines)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in parts}


def test_the_oldest_versions_are_the_lower_ends_of_the_ranges() -> None:
    oldest = pins("constraints-oldest.txt")
    lowest = {name: next(s.version for s in r.specifier if s.operator == ">=") for name, r in DECLARED.items()}
    assert set(oldest) == set(lowest)
    for name, version in oldest.items():
        same = DECLARED[name].specifier.contains(version) and version.startswith(lowest[name])
        assert same, f"{name}: {lowest[name]} is declared, {version} is tried"


def test_the_pinned_versions_are_in_the_ranges() -> None:
    pinned = pins("constraints.txt")
    assert all(r.specifier.contains(pinned[name]) for name, r in DECLARED.items())


def test_the_metadata_is_whole() -> None:
    for field in ("description", "readme", "license", "authors", "keywords", "classifiers", "requires-python"):
        assert PROJECT[field], field
    versions = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert versions == ["3.11", "3.12", "3.13"]
