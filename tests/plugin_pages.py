"""A page of docs/how-to that adds something in one file: its block of code as a plugin, for the tests of one module."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from toolkit.plugins import VARIABLE, load_plugins


@contextlib.contextmanager
def plugin_of(page: str, folder: Path, registry: dict[str, Any], name: str) -> Iterator[Path]:
    """Inside, the block of ``page`` is a file in ``folder`` that TOOLKIT_PLUGINS names, and ``name`` is registered."""
    text = (Path(__file__).parents[1] / "docs/how-to" / page).read_text(encoding="utf-8")
    block = re.search(r'```python title="(.*?)"\n(.*?)```', text, re.DOTALL)
    assert block is not None
    file = folder / block.group(1)
    file.write_text(block.group(2), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(file))
        load_plugins()
        yield file
    del registry[name]
