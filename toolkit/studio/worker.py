"""A worker process: tasks on what requests bring, in a sandbox. ``python -m toolkit.studio.worker SETTINGS``.

One JSON object a line on standard input, {task, arguments}; one a line back, {ok} or {problems} or {error}.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.studio.sandbox import Sandbox, limit


@dataclass(frozen=True)
class Settings:
    """``own``: the folder that it may write to. ``roots``: folders that it may read. ``public``: hostile input is
    expected: no files, no network. ``heavy``: it imports torch. ``cache``: of the hub."""

    own: Path
    roots: tuple[Path, ...]
    public: bool
    heavy: bool
    cache: Path

    def to_text(self) -> str:
        values = {"own": str(self.own), "roots": [str(root) for root in self.roots], "cache": str(self.cache)}
        return json.dumps(values | {"public": self.public, "heavy": self.heavy})

    @classmethod
    def of(cls, text: str) -> Settings:
        found = json.loads(text)
        roots = tuple(Path(root) for root in found["roots"])
        return cls(Path(found["own"]), roots, found["public"], found["heavy"], Path(found["cache"]))


TASKS = {
    "recipe": "toolkit.studio.recipe_task:recipe",
    "warm": "toolkit.studio.plan_task:warm",
    "plan": "toolkit.studio.plan_task:plan",
    "check": "toolkit.studio.file_tasks:check",
    "fix": "toolkit.studio.file_tasks:fix",
    "explain": "toolkit.studio.file_tasks:explain",
    "migrate": "toolkit.studio.file_tasks:migrate",
    "import": "toolkit.studio.file_tasks:import_config",
    "data": "toolkit.studio.plan_task:data",
}
_MEMORY = {True: 24 << 30, False: 4 << 30}
"""Bytes of address space: torch alone maps several GiB of libraries that are never read."""


def main() -> None:
    """Answer until standard input ends."""
    settings = Settings.of(sys.argv[1])
    # Nothing else may read the requests or write among the answers: a library that asks or prints does neither here.
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115  # for as long as the process
    warnings.filterwarnings("ignore")
    limit(_MEMORY[settings.heavy])
    roots = () if settings.public else settings.roots
    Sandbox(settings.own, roots, settings.cache, network=not settings.public).enter()
    for line in requests:
        answers.write(json.dumps(_answered(line, settings)).encode() + b"\n")
        answers.flush()
        gc.collect(0)


def _answered(line: bytes, settings: Settings) -> dict[str, Any]:
    try:
        asked = json.loads(line)
        module, _, name = TASKS[asked["task"]].partition(":")
        task: Callable[[Settings, dict[str, Any]], Any] = getattr(importlib.import_module(module), name)
        return {"ok": task(settings, asked["arguments"])}
    except ToolkitError as error:
        return {"problems": str(error).splitlines()}
    except PermissionError as error:
        where = f": {error.filename}" if error.filename else ""
        return {"problems": [f"{error.strerror}{where}"]}
    except (MemoryError, RecursionError) as error:
        return {"problems": [f"this input is too large or too deep ({type(error).__name__})"]}
    except Exception as error:
        traceback.print_exc()
        return {"error": type(error).__name__}


if __name__ == "__main__":
    main()
