"""Weights that an option keeps beside those that train (``toolkit/rooms.py``: ``Option.shadow``)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from toolkit.strategies.engines.base import Engine


class ShadowWeights:
    """A copy of an engine's float32 weights, which ``update`` changes: held where the weights are, and sharded as they
    are.

    Whole tensors of it are read and written by the engine's own methods for weights, inside ``swapped``.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tensors = [tensor.detach().clone() for tensor in engine.masters()]

    def update(self, updates: int) -> None:
        """Take in the weights after this many updates, skipped steps not counted. Every rank calls it."""
        raise NotImplementedError

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Context in which the engine's weights are these, and these are kept in their place. Every rank enters it; no
        forward may run inside: copies that a forward uses are not changed."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for shadow, weight in zip(self.tensors, self.engine.masters(), strict=True):
            before = weight.detach().clone()
            weight.copy_(shadow)
            shadow.copy_(before)
