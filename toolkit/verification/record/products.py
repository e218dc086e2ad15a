"""Every float8 product of a micro-batch, held against the definition on that product's own operands, while it runs.

The operands are the same to the bit on both sides, so none can fall to another float8 number, and what is left is the
rounding of the result: an error that the whole model's comparison would take for noise is seen here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from toolkit.model import fp8
from toolkit.reference.fp8 import E4M3, E5M2, rounded
from toolkit.upstream.torch import modes_off


@dataclass(frozen=True)
class Product:
    """One product that was looked at. ``kind``: output, gradient of the input or of the weight. ``error``: of the worst
    element, in units of what rounding explains."""

    step: int
    micro: int
    layer: str
    kind: str
    error: float


@dataclass(frozen=True)
class _Saved:
    """Stands for a function's context in its backward: of a recomputed block tensors are given back once only."""

    saved_tensors: tuple[torch.Tensor, ...]
    needs_input_grad: tuple[bool, ...]


class ProductWatch:
    """Wraps Fp8Linear and its products; ``here`` says which step and micro-batch they are of, or None where
    none is looked at."""

    def __init__(self, model: nn.Module, here: Callable[[], tuple[int, int] | None]) -> None:
        self.names = {id(layer): name for name, layer in fp8.fp8_layers(model).items()}
        self.here = here
        self.seen: list[Product] = []
        self._layer = ""

    @contextlib.contextmanager
    def watching(self) -> Iterator[list[Product]]:
        layer: Any = fp8.Fp8Linear
        product: Any = fp8.Fp8Product
        call, forward, backward = layer.forward, product.forward, product.backward
        layer.forward = self._watched_call(call)
        product.forward = staticmethod(self._watched_forward(forward))
        product.backward = staticmethod(self._watched_backward(backward))
        try:
            yield self.seen
        finally:
            layer.forward = call
            product.forward, product.backward = staticmethod(forward), staticmethod(backward)

    def _watched_call(self, call: Any) -> Any:
        def watched(layer: Any, input: torch.Tensor) -> torch.Tensor:
            self._layer = self.names.get(id(layer), "")
            return call(layer, input)

        return watched

    def _watched_forward(self, forward: Any) -> Any:
        def watched(ctx: Any, input: torch.Tensor, weight: torch.Tensor, trains: bool) -> torch.Tensor:
            output: torch.Tensor = forward(ctx, input, weight, trains)
            ctx.watched = None
            if (at := self.here()) is not None:
                with _unseen():
                    x = rounded(input.flatten(0, -2), E4M3)
                    self._note(at, "output", output.flatten(0, -2), x, _weight(weight, input.dtype).t())
                ctx.watched = (at, self._layer, x if trains else None)
            return output

        return watched

    def _watched_backward(self, backward: Any) -> Any:
        def watched(ctx: Any, *grads: torch.Tensor) -> Any:
            saved = _Saved(ctx.saved_tensors, ctx.needs_input_grad)
            found = backward(saved, *grads)
            if ctx.watched is not None:
                with _unseen():
                    self._note_backward(ctx.watched, grads[0], saved.saved_tensors[0], found)
            return found

        return watched

    def _note_backward(self, watched: tuple, grad: torch.Tensor, weight: torch.Tensor, found: Any) -> None:
        at, self._layer, x = watched
        rows = rounded(grad.flatten(0, -2), E5M2)
        if found[0] is not None:
            self._note(at, "gradient of the input", found[0].flatten(0, -2), rows, _weight(weight, grad.dtype))
        if found[1] is not None and x is not None:
            # Of the compute dtype's precision, whatever dtype the weight is kept in.
            self._note(at, "gradient of the weight", found[1].to(grad.dtype), rows.t(), x)

    def _note(
        self, at: tuple[int, int], kind: str, seen: torch.Tensor, left: torch.Tensor, right: torch.Tensor
    ) -> None:
        self.seen.append(Product(*at, self._layer, kind, distance(seen.detach(), left, right)))


def distance(seen: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> float:
    """How far the worst element of ``seen`` is from ``left @ right`` (float64), in units of what rounding explains.

    The result is rounded once, by half a unit in the last place at most. The sum of n products in float32 errs by n
    times 2^-24 of the sum of their sizes (Higham, Accuracy and Stability, section 3.1); on a GPU, where the tensor
    cores keep 14 bits of a sum of 32 products (arXiv:2412.19437, section 3.3.2), by 2^-13 of it for every 32.
    """
    exact, sizes = left @ right, left.abs() @ right.abs()
    terms = left.shape[1]
    sums = (terms / 32 + 1) * 2.0**-13 if seen.is_cuda else terms * 2.0**-24
    half = torch.finfo(seen.dtype).eps / 2
    allowed = half * (exact.abs() + sums * sizes) + sums * sizes + torch.finfo(seen.dtype).tiny
    worst = ((seen.double() - exact).abs() / allowed).max().item()
    return worst if worst == worst else float("inf")


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """What is computed here is no part of the run: selective checkpointing would keep its products and give them back
    in place of the block's own."""
    with torch.no_grad(), modes_off():
        yield


def _weight(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return rounded(weight.to(dtype), E4M3)
