"""Modules import one another in one direction, without cycles, and nothing heavy before it is needed."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# What writes the HTML pages is used by the commands of the packages whose results it shows.
PAGES = {("planning", "report"), ("verification", "report"), ("benchmark", "report"), ("inspection", "report")}


def modules() -> dict[str, Path]:
    found = {}
    for path in (ROOT / "toolkit").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, known: set[str]) -> set[str]:
    """Modules of the toolkit that a file imports, also within functions; not those for annotations alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    annotations = {
        node
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for node in ast.walk(branch)
    }
    found = set()
    for node in ast.walk(tree):
        if node in annotations:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in known else node.module for name in full}
    return found & known


@functools.cache
def graph() -> dict[str, set[str]]:
    known = modules()
    return {name: imports(path, set(known)) - {name} for name, path in known.items()}


def cycle(edges: dict[str, set[str]]) -> list[str] | None:
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return None


def test_a_cycle_is_found() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) is not None
    assert cycle({"a": {"b"}, "b": {"c"}, "c": set()}) is None


def test_no_modules_import_each_other_in_a_circle() -> None:
    edges = graph()
    assert "toolkit.strategies.base" in edges["toolkit.strategies"], "the graph sees no imports"
    assert cycle(edges) is None


def test_no_packages_import_each_other_in_a_circle() -> None:
    edges: dict[str, set[str]] = {}
    for name, others in graph().items():
        package = ".".join(name.split(".")[1:2])
        for other in others:
            to = ".".join(other.split(".")[1:2])
            if package and to and to != package and (package, to) not in PAGES:
                edges.setdefault(package, set()).add(to)
    assert "recipe" in edges["strategies"], "the graph sees no imports"
    assert cycle(edges) is None


# What is configured, imported, linted and checked before anything heavy is imported; in one process, in this order.
LIGHT = """
import sys
import toolkit
assert not [name for name in sys.modules if name.startswith("toolkit.")], "import toolkit imports more"
def heavy(after, *more):
    found = {"torch", "transformers", "accelerate", "deepspeed", "peft", "datasets", "pandas", *more} & set(sys.modules)
    assert not found, f"{after}: {found}"
import toolkit.data, toolkit.data.preflight
heavy("the data's preflight", "pyarrow", "numpy")
from toolkit import Recipe, import_config, lint, load_recipe, migrate, resolve, write_config
heavy("names of toolkit")
import_config(["sft.yaml"], ["data.format=text"])
heavy("import_config")
"""


@pytest.mark.usefixtures("launches")
def test_nothing_heavy_is_imported_before_it_is_needed(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text("model_name_or_path: org/model\ndataset_name: org/data\npacking: false\n")
    command = [sys.executable, "-c", LIGHT]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
