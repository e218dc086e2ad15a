"""A forward without the values of weights, in which what depends on no weight is computed all the same.

How many patches a model makes, where their features go among the tokens, and how a mask is shaped depend on values: of
grids, ids and masks. So such a forward computes whatever no weight, activation or pixel went into, and has shapes alone
for the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from toolkit.trees import leaves
from toolkit.upstream.torch import DispatchMode, is_fake, modes_off


class Values(DispatchMode):
    """Inside torch's fake mode: operations on tensors with values are computed, those that meet one without are not."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(is_fake(item) for item in leaves((args, kwargs))):
            if func in _INDEXED:
                args = (args[0], _numbers(args[1]), *args[2:])
            return func(*args, **kwargs)
        with modes_off():
            return func(*args, **kwargs)


_INDEXED = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)


def _numbers(indices: Sequence[Any]) -> list[Any]:
    """Masks that have values as the numbers of their places: how many these are is a shape, which a mask hides."""
    found: list[Any] = []
    for index in indices:
        mask = isinstance(index, torch.Tensor) and index.dtype == torch.bool and not is_fake(index)
        with modes_off():
            found += index.nonzero().unbind(1) if mask else [index]
    return found
