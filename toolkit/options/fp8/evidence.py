"""That products run in float8: the layers that do, how many products there are, and that each is right.

Every product of a micro-batch is held against the definition on its own operands, while it runs. These are the same to
the bit on both sides, so none can fall to another float8 number, and what is left is the rounding of the result: an
error that the whole model's comparison would take for noise is seen here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from toolkit.options.fp8 import apply as fp8
from toolkit.options.fp8.reference import E4M3, E5M2, Counted, rounded
from toolkit.recipe.resolve import Resolved
from toolkit.strategies.engines.claims import Claim
from toolkit.upstream.torch import modes_off
from toolkit.verification.cases.case import counted_step
from toolkit.verification.compare.measure import Measure, Stage
from toolkit.verification.diagnose.diagnosis import Diagnosis
from toolkit.verification.record.trace import Product, RankTrace

FLOAT8_LAYERS = "float8-layers"
KINDS = {
    "product": (
        "{name}: {product}",
        "in roundings off the product of the same operands, rounded to float8 by the definition",
    )
}


def layers_claim(model: nn.Module, converted: int) -> Claim:
    """The layers that were converted are those of the model that trains."""
    seen = len(fp8.fp8_layers(model))
    return Claim(FLOAT8_LAYERS, "linear layers in float8", str(converted), str(seen), seen == converted > 0)


def engaged(ranks: Sequence[RankTrace], resolved: Resolved, counted: Counted) -> list[Claim]:
    """As many layers as the plain loop rounds the products of, and as many products as it took in one step, seen where
    torch runs them. A recomputed block multiplies once more; compiled code may, too."""
    right = str(counted.layers)
    claims = [
        replace(claim, expected=right, ok=claim.ok and claim.seen == right)
        for claim in ranks[0].claims
        if claim.id == FLOAT8_LAYERS
    ]
    forward, backward = counted.forward, counted.backward
    full = resolved.recipe.activation_checkpointing == "full"
    seen = sum(rank.operators.get("fp8", 0) for rank in ranks)
    least = forward + backward + (counted.recomputed if full else 0)
    most = forward + backward + (forward if full else 0)
    ok = seen >= forward + backward > 0 if resolved.recipe.compile else 0 < least <= seen <= most
    expected = f"{forward + backward} or more" if resolved.recipe.compile else str(most)
    if least < most and not resolved.recipe.compile:
        expected = f"{least} to {most}"
    return [
        *claims,
        Claim("float8-products", f"float8 products in step {counted_step(resolved) + 1}", expected, str(seen), ok),
    ]


def stage(ranks: Sequence[RankTrace]) -> Stage:
    """Each product against the definition on its own operands."""
    stage = Stage("products", detection_limit=1.0)
    for rank in ranks:
        for one in rank.products:
            stage.measures.append(
                Measure(
                    "product", one.step, one.error, 1.0, one.layer, 1.0, one.micro, rank.rank, {"product": one.kind}
                )
            )
    worst = max((m.error for m in stage.measures), default=0.0)
    stage.summary = f"{len(stage.measures)}, {worst:.2f} of 1 rounding"
    return stage


def diagnose(stage: Stage, measure: Measure) -> Diagnosis:
    of_step = [m for m in stage.measures if m.step == measure.step]
    wrong = [m for m in of_step if not m.ok]
    kinds = ", ".join(sorted({m.facts["product"] for m in wrong}))
    facts = {"step": measure.step + 1, "count": len(wrong), "all": len(of_step), "kinds": kinds}
    return Diagnosis("float8-product-wrong", facts)


def watching(model: nn.Module, here: Callable[[], tuple[int, int] | None]) -> Any:
    return ProductWatch(model, here).watching()


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
