"""What a kept trace depends on.

The key of an entry has the recipe's part that planners depend on (toolkit/planning/reuse.py), the model's config, the
training loop, Python, the names and versions of all installed packages (transformers chooses code by what is
installed), and the hash of the toolkit's source. An entry also lists the source files of transformers, PEFT and
accelerate that its traces imported, with size and time of change: packages that are edited in place change no version.

What code of a model's own, of plugins or of a tokenizer does is not in the key, so nothing is kept there.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.planning.loops import LOOPS, habits_of
from toolkit.planning.reuse import planner_key
from toolkit.plugins import GROUPS, VARIABLE
from toolkit.recipe.tokenizer_facts import added_tokens

if TYPE_CHECKING:
    from toolkit.planning.images import Images
    from toolkit.planning.loops import Loop
    from toolkit.recipe.resolve import Resolved

FORMAT = 1
"""Of an entry's file."""
_TRACED = ("transformers", "peft", "accelerate")
"""Packages whose Python code a trace runs."""
_ROOT = Path(__file__).resolve().parents[1]


def entry_key(resolved: Resolved, length: int, loop: Loop, images: Images | None) -> str | None:
    """The key of a planner; None where a trace depends on more than a key can say: a model with code of its own,
    plugins, a tokenizer with new tokens, a loop that is not the table's."""
    recipe = resolved.recipe
    name = next((name for name, known in LOOPS.items() if known is loop), None) or habits_of(loop)
    if name is None or recipe.model.trust_remote_code or added_tokens(recipe) or has_plugins():
        return None
    key = planner_key(resolved, length, name, images)
    if " at 0x" in key:  # an object without a text of its own: another process would not know it again
        return None
    return f"{environment()}\n{key}"


def has_plugins() -> bool:
    """Whether code of others may have changed what a trace runs."""
    return bool(os.environ.get(VARIABLE)) or any(metadata.entry_points(group=group) for group in GROUPS)


@functools.cache
def environment() -> str:
    """Python, the installed packages and the toolkit's source, as a hash."""
    parts = [str(FORMAT), platform.python_version(), platform.machine(), *installed(), toolkit_source()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def installed() -> list[str]:
    """Names and versions of all packages that can be imported, as their metadata folders are called."""
    found = set()
    for folder in sys.path:
        if os.path.isdir(folder):
            found |= {name for name in os.listdir(folder) if name.endswith((".dist-info", ".egg-info"))}
    return sorted(found)


def toolkit_source() -> str:
    """Hash of the toolkit's Python files."""
    digest = hashlib.sha256()
    for path in _toolkit_files():
        digest.update(f"{path.relative_to(_ROOT)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _toolkit_files() -> list[Path]:
    return sorted(_ROOT.rglob("*.py"))


def source_stamps() -> dict[str, list[int]]:
    """Bytes and time of change, in ns, of the source files that were imported of ``_TRACED``, by path."""
    found = {}
    for name, module in sorted(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if name.partition(".")[0] in _TRACED and path is not None and path.endswith(".py"):
            found[path] = _stamp(path)
    return found


def unchanged(stamps: dict[str, list[int]]) -> bool:
    """Whether all files of `source_stamps` are as they were. Raises OSError if one is gone."""
    return all(_stamp(path) == stamp for path, stamp in stamps.items())


def changed_since(time_ns: int) -> bool:
    """Whether source that a trace runs was changed after ``time_ns``, the toolkit's or a package's."""
    if any(changed >= time_ns for _, changed in source_stamps().values()):
        return True
    return any(path.stat().st_mtime_ns >= time_ns for path in _toolkit_files())


def _stamp(path: str) -> list[int]:
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns]
