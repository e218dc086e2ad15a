"""Values inside of tuples, lists and dicts: what functions of torch are called with, and what they return."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def leaves(values: Any) -> Iterator[Any]:
    """What is not a tuple, list or dict, in order; a dict's in that of its keys' arrival."""
    if isinstance(values, tuple | list):
        for value in values:
            yield from leaves(value)
    elif isinstance(values, dict):
        for value in values.values():
            yield from leaves(value)
    else:
        yield values


def mapped(function: Callable[[Any], Any], values: Any) -> Any:
    """The same tuples, lists and dicts of what ``function`` makes of each leaf; of classes of their own that cannot be
    made again so, the leaf is the whole."""
    if type(values) in (tuple, list):
        return type(values)([mapped(function, value) for value in values])
    if isinstance(values, tuple) and hasattr(values, "_fields"):
        return type(values)(*[mapped(function, value) for value in values])
    if type(values) is dict:
        return {key: mapped(function, value) for key, value in values.items()}
    return function(values)
