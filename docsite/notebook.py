"""The tutorial on the Python API: examples/python_api.ipynb as a page."""

from __future__ import annotations

import json
from pathlib import Path

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples" / "python_api.ipynb"
_FROM = """
!!! tip "Run it yourself"
    This page is the notebook `examples/python_api.ipynb` of the repository.
"""


def pages() -> dict[str, str]:
    """Markdown by path within the site: text as it is, code in blocks."""
    first, *rest = [_cell(cell["cell_type"], "".join(cell["source"])) for cell in _cells()]
    return {"tutorials/python-api.md": "\n\n".join([first, _FROM.strip("\n"), *rest]) + "\n"}


def _cells() -> list[dict[str, str]]:
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


def _cell(kind: str, text: str) -> str:
    return f"```python\n{text}\n```" if kind == "code" else text
