"""Errors of what was written on the command line name the command line, not the recipe's file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from toolkit.errors import InputError

OVERRIDE = "override"
"""How the recipe's loader begins the place of an override; see ``toolkit/recipe/load.py``."""

_OVERRIDE = re.compile(r"[A-Za-z_]\w*(\.\w+)*=")
_PROBLEM = re.compile(r"(?P<key>[a-z_]\w*(?:\.\w+|\[\d+\])*)(?P<rest>(?:: | \().*)", re.DOTALL)


_SIZE = re.compile(r"(\d+(?:\.\d+)?) *(gib|gb|g|mib|mb|m|tib|tb|t)?", re.IGNORECASE)
_GIB = {"m": 2**-10, "mib": 2**-10, "mb": 1e6 / 2**30, "g": 1.0, "gib": 1.0, "gb": 1e9 / 2**30, "t": 2.0**10,
        "tib": 2.0**10, "tb": 1e12 / 2**30}  # fmt: skip


def memory_option(text: str) -> float:
    """GiB of what ``--memory`` says: a number, or one with a unit. Raises InputError for anything else, 0 included."""
    match = _SIZE.fullmatch(text.strip())
    value = float(match[1]) * _GIB[(match[2] or "g").lower()] if match else 0.0
    if value <= 0:
        raise InputError(f"--memory {text}: expected GiB, for example 8 or 8GiB")
    return value


_COUNT = re.compile(r"(\d+(?:\.\d+)?) *([kmbgt]?)", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}


def tokens_option(text: str) -> int:
    """What ``--tokens`` says: a number, or one with k, M, B or T behind it. Raises InputError for anything else."""
    match = _COUNT.fullmatch(text.strip().replace(",", "").replace("_", ""))
    value = round(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if value < 1:
        raise InputError(f"--tokens {text}: expected the tokens of the training data, for example 10M")
    return value


def name_overrides(message: str, arguments: Sequence[str]) -> str:
    """The message of an error, a line for each problem, with «command line: KEY=VALUE» in place of the recipe's file
    where the problem is with a key that ``arguments``, those of the command, set.

    A problem belongs to an override of its key, of a section that contains the key, or of a key within it that its
    text mentions.
    """
    overrides = [one for one in arguments if _OVERRIDE.match(one)]
    return "\n".join(_named(line, overrides, arguments) for line in message.split("\n"))


def _named(line: str, overrides: Sequence[str], arguments: Sequence[str]) -> str:
    if any(line.startswith(f"{OVERRIDE} {one}:") for one in arguments):
        return f"command line: {line.removeprefix(f'{OVERRIDE} ')}"
    source = next((f"{one}: " for one in arguments if line.startswith(f"{one}: ")), "")
    problem = _PROBLEM.fullmatch(line.removeprefix(source))
    told = None if problem is None else _responsible(problem["key"], problem["rest"], overrides)
    return line if told is None else f"command line: {told}: {line.removeprefix(source)}"


def _responsible(key: str, text: str, overrides: Iterable[str]) -> str | None:
    """The last override that a problem with ``key`` is about; None: the file is."""
    found = None
    for override in overrides:
        name = override.partition("=")[0]
        within = name.startswith(f"{key}.") and re.search(rf"\b{name.rpartition('.')[2]}\b", text)
        if within or key == name or key.startswith((f"{name}.", f"{name}[")):
            found = override
    return found
