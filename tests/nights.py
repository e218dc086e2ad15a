"""Which values of a matrix are in the default set, and how large the sets are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

SIZES = pytest.StashKey[dict[str, int]]()
"""Of a session's config: how many tests were collected of each set."""


def nightly_but(values: Iterable[Any], *default: Any) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: of these values ``default`` are in the default set, and the others run
    at night."""
    parameters = []
    for value in values:
        several = value if isinstance(value, tuple) else (value,)
        parameters.append(pytest.param(*several, marks=() if value in default else pytest.mark.nightly))
    return parameters
