"""Lion: the sign of an interpolated momentum, and one moment."""

from __future__ import annotations

from typing import Any

from toolkit.optimizers.base import OptimizerKind, elements


def _temporary(shape: tuple[int, ...], matrix: bool, size: int, ranks: int) -> float:
    return -(-elements(shape) // ranks) * size  # the interpolation of which the sign is taken


def _trainer(optimizer: Any) -> dict[str, Any]:
    beta1, beta2 = optimizer.betas
    return {"optim": "lion_32bit", "adam_beta1": beta1, "adam_beta2": beta2}  # bitsandbytes


OPTIMIZER = OptimizerKind(
    name="lion",
    title="Lion, the sign of the momentum",
    source="Chen et al., arXiv:2302.06675, algorithm 2",
    build="toolkit.optim.lion:build",
    formula="toolkit.reference.optimizers.lion:Lion",
    keys=("betas",),
    defaults={"betas": [0.9, 0.99]},
    lr="a third to a tenth of AdamW's, with a weight decay three to ten times AdamW's (the paper, section 5)",
    state=lambda shape, matrix, size: float(elements(shape) * size),
    tensors=lambda optimizer, shape, matrix: ("exp_avg",),
    passes=5,
    counts=lambda matrix: False,
    temporary=_temporary,
    trainer=_trainer,
)
