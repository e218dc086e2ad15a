"""Rules register themselves: a new rule is a new function (or file) under `rules/`."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from functools import cache

from toolkit.linting.model import Check, Files, Reader, Rule, Severity

_RULES: dict[str, Rule] = {}


def rule(
    code: str,
    severity: Severity,
    *,
    source: str,
    fails: Files,
    passes: Files,
    reader: Reader | None = None,
) -> Callable[[Check], Check]:
    """Register a check. Its docstring's first line is the title, the rest the reason.

    ``fails`` and ``passes`` are whole files: `toolkit explain` prints them and a test lints them.
    """

    def register(check: Check) -> Check:
        assert code not in _RULES, f"duplicate rule code {code}"
        title, _, reason = inspect.cleandoc(check.__doc__ or "").partition("\n")
        assert title, f"{code} has no title"
        _RULES[code] = Rule(code, severity, title.rstrip("."), reason.strip(), source, fails, passes, check, reader)
        return check

    return register


@cache
def all_rules() -> dict[str, Rule]:
    """Every rule by its code."""
    package = importlib.import_module("toolkit.linting.rules")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"toolkit.linting.rules.{module.name}")
    return dict(sorted(_RULES.items()))
