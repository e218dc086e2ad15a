"""A loop of one's own: the model's loss, its backward, an optimizer's step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn


@contextlib.contextmanager
def held_outputs(model: nn.Module) -> Iterator[None]:
    """``outputs = model(**batch)``: what is returned, logits too, is a variable that lives while the backward runs."""
    held: list[Any] = []
    hook = model.register_forward_hook(lambda module, given, output: held.append(output))
    try:
        yield
    finally:
        hook.remove()
        held.clear()


@contextlib.contextmanager
def both(first: Any, second: Any) -> Iterator[None]:
    with first, second:
        yield
