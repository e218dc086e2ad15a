"""Muon for hidden matrices, AdamW for all other weights."""

from __future__ import annotations

from typing import Any

from toolkit.optimizers.base import ADAM, OptimizerKind, elements, needs_whole_tensors


def _state(shape: tuple[int, ...], matrix: bool, size: int) -> float:
    return float(elements(shape) * size * (1 if matrix else 2))


def _temporary(shape: tuple[int, ...], matrix: bool, size: int, ranks: int) -> float:
    """The peak of torch.optim.Muon's step (torch 2.13.0, _muon.py), in the product that updates the iterate: the
    interpolated momentum in the trained dtype; in bf16 the iterate, the new one, and two Gram matrices of the smaller
    side. Sharded: the part of the interpolated momentum, and whole what is gathered, its buffer in the inner step, and
    the result."""
    if not matrix:
        return 0.0
    count, smaller = elements(shape), min(shape)
    iteration = 2 * (2 * count + 2 * smaller * smaller)
    if ranks == 1:
        return count * size + iteration
    return -(-count // ranks) * size + 3 * count * size + iteration


def _flops(optimizer: Any, shape: tuple[int, ...], matrix: bool) -> float:
    """Of each iteration two products of the smaller side squared with the larger, and one of the smaller side cubed."""
    if not matrix:
        return 0.0
    smaller, larger = min(shape), max(shape)
    return float(optimizer.ns_steps * (4 * smaller**2 * larger + 2 * smaller**3))


def _settings(optimizer: Any) -> str:
    rate = {
        "match_rms_adamw": "lr x 0.2 x sqrt(larger side), so that lr is on AdamW's scale",
        "original": "lr x sqrt(max(1, rows / columns)), with a customary lr of 0.02",
    }[optimizer.adjust_lr_fn]
    return (
        f"2-D weights of hidden layers ({rate}); embeddings, the output head, norms, biases and tensors that are not "
        "2-D are updated by AdamW with lr, betas and eps"
    )


OPTIMIZER = OptimizerKind(
    name="muon",
    title="Muon for hidden matrices, AdamW for all other weights",
    source="Jordan, kellerjordan.github.io/posts/muon; Liu et al., arXiv:2502.16982, algorithm 1",
    build="toolkit.optim.muon:build",
    formula="toolkit.reference.optimizers.muon:Muon",
    keys=("momentum", "nesterov", "ns_steps", "adjust_lr_fn", "betas", "eps"),
    defaults={"momentum": 0.95, "nesterov": True, "ns_steps": 5, "adjust_lr_fn": "match_rms_adamw"},
    lr="AdamW's with adjust_lr_fn: match_rms_adamw; 0.02 with original",
    refusal=needs_whole_tensors("muon orthogonalises whole matrices"),
    splits=True,
    passes=5,
    flops=_flops,
    gathers=lambda matrix: int(matrix),
    state=_state,
    tensors=lambda optimizer, shape, matrix: ("momentum_buffer",) if matrix else ADAM,
    counts=lambda matrix: not matrix,
    temporary=_temporary,
    settings=_settings,
)
