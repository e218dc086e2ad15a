"""A kept result as a gate: whether today's verdict and detection limits are as good."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import InputError

MEASURED = 2.0
"""A measured detection limit may grow by this factor: draws of correct runs differ by 1.8 at most (compare/noise.py).
A bound is the same each time."""
_SAME = 1.0 + 1e-6


@dataclass(frozen=True)
class Comparison:
    """``weaker``: what was proven then and is not now, in sentences. ``changed``: the recipe is another one."""

    source: str
    weaker: tuple[str, ...]
    changed: bool

    @property
    def ok(self) -> bool:
        return not self.weaker

    def to_json(self) -> dict[str, Any]:
        """``file``, ``ok``, ``weaker`` and ``recipe_changed``."""
        return {"file": self.source, "ok": self.ok, "weaker": list(self.weaker), "recipe_changed": self.changed}

    def lines(self) -> list[str]:
        """For the screen."""
        lines = [f"weaker than {self.source}: {one}" for one in self.weaker] or [f"baseline: as good as {self.source}"]
        return [*lines, *([f"note: the recipe has changed since {self.source} was written"] if self.changed else [])]


def read_baseline(file: str) -> dict[str, Any]:
    """The result that `toolkit verify --json` wrote; raises InputError if it is not one."""
    try:
        document = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"--baseline: {file}: {error.strerror}; write it with --json {file}") from None
    except ValueError:
        raise InputError(f"--baseline: {file} is not JSON; write it with --json {file}") from None
    if not isinstance(document, dict) or "verdict" not in document or not isinstance(document.get("passes"), list):
        raise InputError(f"--baseline: {file} is not a result of toolkit verify; write it with --json {file}")
    return document


def compare(kept: Mapping[str, Any], now: Mapping[str, Any], source: str) -> Comparison:
    """Hold ``now`` against ``kept``, both results of `toolkit verify`. ``source``: the file of the kept one."""
    weaker = []
    if kept["verdict"] == "equivalent" and now["verdict"] != "equivalent":
        weaker.append(f"the verdict is {now['verdict']}, and was equivalent")
    passes = {one["pass"]: one for one in now["passes"]}
    for one in kept["passes"]:
        if one["pass"] not in passes:
            weaker.append(f"no {one['pass']} pass")
        else:
            weaker += _stages(one, passes[one["pass"]])
    seen = {(claim["pass"], claim["id"]) for claim in now["engagement"] if claim["ok"]}
    for claim in kept["engagement"]:
        if claim["ok"] and (claim["pass"], claim["id"]) not in seen:
            weaker.append(f"{claim['pass']} pass: no evidence for: {claim['claim']}")
    return Comparison(source, tuple(dict.fromkeys(weaker)), kept.get("recipe_sha256") != now.get("recipe_sha256"))


def _stages(kept: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    found = []
    stages = {stage["stage"]: stage for stage in now["stages"]}
    grown = MEASURED if now.get("tolerance") == "measured" and kept.get("tolerance") == "measured" else _SAME
    for stage in kept["stages"]:
        place = f"{kept['pass']} pass, {stage['stage']}"
        if stage["stage"] not in stages:
            found.append(f"{place}: not compared")
            continue
        before, after = stage["detection_limit"], stages[stage["stage"]]["detection_limit"]
        if before is not None and after is None:
            found.append(f"{place}: no detection limit, was {before:.1e}")
        elif before is not None and after > before * grown:
            found.append(f"{place}: detects errors from {after:.1e}, was {before:.1e}")
    return found


def badge(result: Mapping[str, Any]) -> dict[str, Any]:
    """A result as the JSON that shields.io shows (https://shields.io/badges/endpoint-badge): the verdict, and from what
    size on a wrong gradient is detected in the last pass."""
    limits = [stage["detection_limit"] for one in result["passes"] for stage in one["stages"]
              if stage["stage"] == "gradient" and stage["detection_limit"] is not None]  # fmt: skip
    proven = result["verdict"] == "equivalent"
    message = f"equivalent, {limits[-1]:.1e}" if proven and limits else str(result["verdict"])
    color = "brightgreen" if proven else "red"
    return {"schemaVersion": 1, "label": "toolkit verify", "message": message, "color": color}
