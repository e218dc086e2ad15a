"""AdamW: decoupled weight decay, two moments in the trained dtype."""

from __future__ import annotations

from typing import Any

from toolkit.optimizers.base import OptimizerKind


def _trainer(optimizer: Any) -> dict[str, Any]:
    return {"optim": f"adamw_torch{'_fused' if optimizer.kernel == 'fused' else ''}"} | adam_arguments(optimizer)


def adam_arguments(optimizer: Any) -> dict[str, Any]:
    """The Trainer's arguments of every Adam."""
    beta1, beta2 = optimizer.betas
    return {"adam_beta1": beta1, "adam_beta2": beta2, "adam_epsilon": optimizer.eps}


def _copies(optimizer: Any, decays: bool) -> int:
    # torch 2.13.0 optim/adam.py, ``_multi_tensor_adam``: the roots of the second moments.
    return int(optimizer.kernel == "foreach")


OPTIMIZER = OptimizerKind(
    name="adamw",
    title="AdamW with decoupled weight decay",
    source="Loshchilov and Hutter, arXiv:1711.05101, algorithm 2",
    build="toolkit.optim.adamw:build",
    formula="toolkit.reference.optimizers.adamw:AdamW",
    keys=("kernel", "betas", "eps"),
    lr="2e-4",
    # ``_multi_tensor_adam``: decay 2, lerp 3, mul 2, addcmul 3, sqrt 2, div 2, add 2, addcdiv 4.
    foreach_passes=20,
    copies=_copies,
    trainer=_trainer,
)
