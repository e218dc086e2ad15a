"""What helps a run that found no memory, from `toolkit plan` in a process of its own: this one has not imported torch,
and the message about the failure does not depend on the plan."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from toolkit.errors import OutOfMemory

_SECONDS = 300.0
_LESS = 0.97
"""A plan that fits where the run did not is asked for a change that takes at least so much less."""


def memory_advice(recipe_file: str, overrides: Sequence[str], error: OutOfMemory) -> str:
    """Lines to print after the failure."""
    device_gib = error.device_gib
    command = ["plan", recipe_file, *overrides, *([] if device_gib is None else ["--memory", f"{device_gib:.3f}"])]
    first = _planned(command)
    if isinstance(first, str):
        return first
    one, change = first["candidates"][0], first["smallest_change"]
    needs, usable = one["needed_bytes"] / 2**30, first["usable_bytes"] / 2**30
    if not one["fits"]:
        return f"the plan: {one['reason']}\n{_change(change)}"
    said = f"the plan expects {needs:.1f} GiB, {usable:.1f} usable: {_then(error)}"
    capacity = usable / (1 - first["headroom"])
    tighter = _planned([*command, "--headroom", f"{max(0.0, 1 - _LESS * needs / capacity):.4f}"])
    return said if isinstance(tighter, str) else f"{said}\n{_change(tighter['smallest_change'])}"


def _then(error: OutOfMemory) -> str:
    """What to look at where the plan fits and the run did not."""
    if error.address_gib is not None:
        return f"the limit of {error.address_gib:.2f} GiB of address space (ulimit -v) is too low; raise it"
    return f"does another process use the {'machine' if error.device_gib is None else 'GPU (nvidia-smi)'}?"


def _change(change: str | None) -> str:
    return "nothing smaller fits" if change is None else f"to make it fit: {change}"


def _planned(command: Sequence[str]) -> dict[str, Any] | str:
    """The plan's JSON, or why there is none."""
    words = [sys.executable, "-m", "toolkit", *command, "--json", "-"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"no plan within {_SECONDS:.0f} s; toolkit {' '.join(command)} computes what would fit"
    if done.returncode not in (0, 1) or not done.stdout:
        return f"no plan: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else 'it failed'}"
    found: dict[str, Any] = json.loads(done.stdout)
    return found
