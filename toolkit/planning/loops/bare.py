"""A loop of one's own: the model's loss, its backward, an optimizer's step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from toolkit.model import nf4


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


@contextlib.contextmanager
def one_level() -> Iterator[None]:
    """4-bit weights without double quantisation (``bnb_4bit_use_double_quant=False``): float32 statistics."""
    own = nf4.sized_nf4

    def sized(weight: Any, storage: Any, nested: bool = True) -> Any:
        return own(weight, storage, nested=False)

    nf4.sized_nf4 = sized
    try:
        yield
    finally:
        nf4.sized_nf4 = own
