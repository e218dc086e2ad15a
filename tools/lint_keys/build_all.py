"""Every package's table of keys, from what is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tools.lint_keys import build_accelerate, build_deepspeed, build_transformers, build_trl
from tools.lint_keys.build import Table, table


def build_all() -> dict[str, dict[str, Any]]:
    """Every package's table, from what is installed here."""
    readers: dict[str, Callable[[], Table]] = {
        "accelerate": build_accelerate.read,
        "deepspeed": build_deepspeed.read,
        "transformers": build_transformers.read,
        "peft": build_transformers.read_peft,
        "trl": build_trl.read,
    }
    return {name: table(name, reader()) for name, reader in readers.items()}
