"""Causes of a gradient that is wrong because a checkpointed block computes something else the second time."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from toolkit.model.checkpointing import keep_costly
from toolkit.verification.compare.noise import relative_error
from toolkit.verification.compare.replay import Reference
from toolkit.verification.diagnose.diagnosis import Diagnosis

_EXPLAINED = 1e-3
"""What is left of a gradient's error where the plain loop errs alike; 16-bit rounding leaves more."""


def recomputed_otherwise(
    reference: Reference,
    step: int,
    weights: dict[str, torch.Tensor],
    gradient: dict[str, torch.Tensor | None],
    wrong: Sequence[str],
    right: Sequence[str],
) -> Diagnosis | None:
    """The cause where recomputation is at fault: the plain loop with that defect has the same gradient, or all that is
    wrong is inside of the checkpointed blocks or before them. ``right``: tensors whose gradient agrees."""
    kind = reference.resolved.recipe.activation_checkpointing
    if kind == "none" or not reference.blocks:
        return None
    if kind == "selective" and _bias_twice(reference, step, weights, gradient, wrong):
        return Diagnosis("bias-added-twice", {"count": len(wrong)})
    inside = tuple(f"{name}." for name, _ in reference.blocks)
    beside = [name for name in right if not name.startswith(inside)]
    if beside and any(name.startswith(inside) for name in wrong) and not reference.dropout_matters(0, weights):
        return Diagnosis("recomputation-differs", {"right": beside[0], "count": len(wrong), "first": wrong[0]})
    return None


def _bias_twice(
    reference: Reference,
    step: int,
    weights: dict[str, torch.Tensor],
    gradient: dict[str, torch.Tensor | None],
    wrong: Sequence[str],
) -> bool:
    """Whether all wrong gradients are those of a plain loop with that defect."""
    with _changed_in_place(reference):
        _, found = reference.gradient(step, weights)
    _, plain = reference.gradient(step, weights)
    for name in wrong:
        seen = gradient.get(name)
        if seen is None or name not in found:
            return False
        if relative_error(seen, found[name]) > max(_EXPLAINED, 0.1 * relative_error(seen, plain[name])):
            return False
    return True


@contextlib.contextmanager
def _changed_in_place(reference: Reference) -> Iterator[None]:
    """The plain loop with torch's selective checkpointing and a linear layer that adds its bias in place."""
    original = functional.linear

    def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        product = input.matmul(weight.t())
        if bias is not None:
            product += bias
        return product

    contexts = functools.partial(create_selective_checkpoint_contexts, keep_costly)
    for _, block in reference.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
    functional.linear = linear
    try:
        yield
    finally:
        functional.linear = original
        for _, block in reference.blocks:
            del block.forward
