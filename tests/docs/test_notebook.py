"""The notebook: it uses the public Python API only, and every cell of it runs."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import toolkit
from docsite import notebook

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT: dict[str, Any] = json.loads(notebook.NOTEBOOK.read_text())
CODE = ["".join(cell["source"]) for cell in DOCUMENT["cells"] if cell["cell_type"] == "code"]


def test_it_is_a_valid_notebook_without_outputs() -> None:
    """Without outputs: differences between two versions are differences of the text and the code."""
    pytest.importorskip("nbformat").validate(DOCUMENT)
    assert all(not cell["outputs"] for cell in DOCUMENT["cells"] if cell["cell_type"] == "code")


def test_it_imports_names_of_the_python_api_only() -> None:
    used = set()
    for node in ast.walk(ast.parse("\n".join(CODE))):
        if isinstance(node, ast.Import):
            assert not any(alias.name.partition(".")[0] == "toolkit" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "toolkit":
            assert node.module == "toolkit", f"{node.module} is not public"
            used |= {alias.name for alias in node.names}
    assert used <= set(toolkit.__all__)
    assert {"load_recipe", "resolve", "write_config", "plan", "train", "export", "verify", "lint"} <= used


def test_the_site_shows_it() -> None:
    page = notebook.pages()["tutorials/python-api.md"]
    assert page.startswith("# The toolkit from Python\n")
    assert all(f"```python\n{code}\n```" in page for code in CODE)


@pytest.mark.usefixtures("launches")
@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_its_cells_run(tmp_path: Path) -> None:
    """In one Python process, in order, as Jupyter runs them: `__main__` is not a file."""
    (tmp_path / "cells.json").write_text(json.dumps(CODE))
    run = "import json; [exec(compile(c, f'cell {n}', 'exec')) for n, c in enumerate(json.load(open('cells.json')), 1)]"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", run],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for expected in (
        "optimizer.learning_rate: unknown key",
        "the recipe fits: True",
        "fastest that fits:",
        "10 steps,",
        "full model in runs/notebook/model",
        "equivalent with exit code 0",
        "different · the loss is averaged per micro-batch, not per supervised token",
        "DS101 error gradient_cliping",
    ):
        assert expected in done.stdout, done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"cells.json", "runs"}
