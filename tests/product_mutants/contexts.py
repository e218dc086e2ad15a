"""A plugin of coverage that labels what processes other than pytest's run by the test that they run it for.

A process begins under the label of the test that started it. A worker that serves many tests takes the label anew with
every message that it receives (``multiprocessing``'s connections), and writes what it has so far: it may be killed.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

FOLDER_VARIABLE = "PRODUCT_MUTANTS_CONTEXTS"
"""Environment variable: the folder that ``noting.py`` writes the number of the current test to."""


def current() -> str:
    """The number of the test that runs; empty before the first."""
    with contextlib.suppress(OSError, KeyError):
        return (Path(os.environ[FOLDER_VARIABLE]) / "current").read_text(encoding="utf-8")
    return ""


def _relabel_with_messages() -> None:
    """Once in each process: a fork has what its parent had."""
    connections = sys.modules.get("multiprocessing.connection")
    if connections is None or hasattr(connections.Connection, "labels_coverage"):
        return
    receive = connections.Connection.recv

    import coverage

    def recv(self: Any) -> Any:
        message = receive(self)
        recording, test = coverage.Coverage.current(), current()
        if recording is not None and test:
            recording.switch_context(test)
            recording.save()
        return message

    connections.Connection.recv = recv
    connections.Connection.labels_coverage = True


def coverage_init(registry: Any, options: dict[str, Any]) -> None:
    """Called by coverage where a process begins; a fork begins anew."""
    from coverage import CoveragePlugin

    class Labels(CoveragePlugin):
        def configure(self, config: Any) -> None:
            config.set_option("run:context", current())
            _relabel_with_messages()

    registry.add_configurer(Labels())
