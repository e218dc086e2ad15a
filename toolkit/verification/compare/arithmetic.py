"""What a right candidate's numbers may differ by, where it computes each micro-batch by the plain loop's operations.

The micro-batch itself then comes out equal bit for bit, in 16 bits and fewer too. What is left is the order of sums
over micro-batches and ranks, whose rounding has a bound; no correct run can exceed it, so a verdict has no chance of a
false alarm to account for. Where operations are free to differ (a GPU's kernels, compiled blocks, a fused loss in
several chunks), the tolerance is measured: ``noise.Noise``.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch

from toolkit.model.loss_terms import CHUNK_BYTES
from toolkit.recipe.mesh import stage_blocks
from toolkit.recipe.resolve import Resolved
from toolkit.reference.loop import PlainLoop, Window
from toolkit.reference.order import Order
from toolkit.rooms import asked_options


def order_of(resolved: Resolved, config: Any = None, blocks: int = 0) -> Order:
    """The order in which the recipe's strategy and options compute a model of this ``config``, with so many
    ``blocks``."""
    return Order(
        divisor=resolved.token_parts,
        first=_first(resolved),
        by_module=resolved.traits.sums_input_gradients_by_module,
        # Elsewhere a block reads nothing that another one reads too.
        by_block=resolved.traits.sums_input_gradients_by_block and getattr(config, "is_encoder_decoder", False),
        fused=resolved.loss_kernel != "plain",
        in_parts=resolved.mesh.context > 1,
        columns=resolved.mesh.tensor,
        experts=resolved.mesh.expert,
        stages=tuple(part[0] for part in stage_blocks(blocks, resolved.mesh.pipeline)) if blocks else (0,),
    )


def _first(resolved: Resolved) -> Literal["rank", "micro", "average"]:
    if not resolved.reduces_each_micro_batch:
        return "rank"
    return "average" if resolved.traits.reduces_what_is_added_up else "micro"


def why_measured(resolved: Resolved, windows: list[Window], vocabulary: int, statistics: bool = False) -> str | None:
    """Why a micro-batch's operations may differ from the plain loop's in their order; None if they may not.
    ``statistics``: whether ranks have batch statistics in common."""
    if not resolved.traits.same_operations:
        return f"{resolved.recipe.strategy.name} may compute in another order"
    if resolved.device != "cpu":
        return "a GPU's kernels may sum in another order"
    for option, _ in asked_options(resolved.recipe):
        if option.reorders:
            return option.reorders
    if resolved.recipe.compile:
        return "compiled blocks may compute in another order"
    if resolved.mesh.columns > 2:
        return "a collective adds up parts of hidden states of more than two ranks"
    if statistics and resolved.world_size > 2:
        return "a collective adds up batch statistics of more than two ranks"
    if resolved.loss_kernel != "plain":
        supervised = max(micro.supervised for window in windows for _, micro in window)
        if supervised * 4 * vocabulary > CHUNK_BYTES["cpu"]:
            return "the fused loss adds up several chunks"
    return None


_FACTORS = 4
"""Roundings of the factors that the sum is multiplied by: the loss's weight, the average over ranks, on both sides."""


def sum_bounds(loop: PlainLoop, window: Window) -> dict[str, float]:
    """By tensor: how far the candidate's sum of the window's micro-batches can be from the plain loop's, relative, in
    the 2-norm.

    One rank and two have no order of their own: the plain loop adds up as they do (``Order.first``), and what is left
    are factors. A collective adds up more ranks in an order of its own.
    """
    if not loop.order.by_collective:
        return dict.fromkeys(loop.gradients, _FACTORS * torch.finfo(torch.float32).eps)
    return {
        name: sum_bound(
            len(window) * (1 + (name in loop.in_two)), loop.magnitudes[name].double().norm().item(), gradient
        )
        for name, gradient in loop.gradients.items()
    }


def sum_bound(terms: int, magnitude: float, total: torch.Tensor) -> float:
    """How far two sums of the same ``terms`` tensors can be apart, in any order and multiplied by the same factors;
    relative to ``total``, one of them, in the 2-norm. ``magnitude``: the 2-norm of the sum of their absolute values.

    A sum of k terms errs by at most (k - 1) u times the sum of their sizes (Higham, «Accuracy and Stability of
    Numerical Algorithms», 4.2), u = eps / 2 of the dtype of ``total``, and both sides do.
    """
    size = total.double().norm().item()
    reordered = (terms - 1) * torch.finfo(total.dtype).eps * (magnitude / size if size else 1.0)
    return _FACTORS * torch.finfo(torch.float32).eps + reordered


def loss_bound(loss: float, tokens: int) -> float:
    """How far two sums of a micro-batch's token losses can be apart, relative; the logits are equal bit for bit.

    A token's loss is a logarithm and two differences, each with a rounding of itself or of 1 (the logarithm of a sum of
    exponentials, the largest of which is 1); a pairwise sum of n errs by log2(n) roundings (Higham, 4.2).
    """
    roundings = 4 + math.log2(max(2, tokens))
    size = abs(loss)
    return roundings * torch.finfo(torch.float32).eps * ((size + tokens) / size if size else 1.0)
