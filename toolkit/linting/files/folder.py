"""The configuration files in a folder."""

from __future__ import annotations

import os
import re
from pathlib import Path

from toolkit.linting.files.text import MAX_BYTES

SHELL = (".sh", ".bash", ".sbatch", ".slurm")
_NAMES = (*SHELL, ".yaml", ".yml", ".json")
_KEYS = re.compile(rb"zero_optimization|distributed_type|train_(micro_)?batch_size|num_train_epochs|peft_type")
# Folders that hold other people's files or a program's own.
_SKIPPED = {"node_modules", "site-packages", "__pycache__"}


def walk(folder: str) -> list[str] | None:
    """Every file of a folder that may be a configuration, by name; None if it is not a folder.

    Hidden folders and files over 1 MB are left out.
    """
    if not folder or "\0" in folder or not os.path.isdir(folder):
        return None
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _SKIPPED)
        found += [str(Path(root) / name) for name in sorted(names) if _usable(os.path.join(root, name))]
    return found


def is_for_a_launch(path: str) -> bool:
    """Whether a file that cannot be parsed has a key that decides a launch: then it is worth a message."""
    with open(path, "rb") as file:
        return _KEYS.search(file.read(MAX_BYTES)) is not None


def _usable(path: str) -> bool:
    return path.lower().endswith(_NAMES) and os.path.isfile(path) and os.path.getsize(path) <= MAX_BYTES
