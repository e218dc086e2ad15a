"""Stochastic gradient descent with momentum, as torch.optim.SGD: weight decay is added to the gradient."""

from __future__ import annotations

from typing import Any

from toolkit.optimizers.base import OptimizerKind, elements


def _settings(optimizer: Any) -> str:
    return "weight_decay is an L2 penalty: it is added to the clipped gradient and enters the momentum"


def _trainer(optimizer: Any) -> dict[str, Any]:
    nesterov = "true" if optimizer.nesterov else "false"
    return {"optim": "sgd", "optim_args": f"momentum={optimizer.momentum},nesterov={nesterov}"}


def _copies(optimizer: Any, decays: bool) -> int:
    # torch 2.13.0 optim/sgd.py, ``_multi_tensor_sgd``: gradients with the decayed weights added.
    return int(optimizer.kernel == "foreach" and decays and optimizer.weight_decay > 0)


OPTIMIZER = OptimizerKind(
    name="sgd",
    title="stochastic gradient descent with momentum",
    source="Sutskever et al., ICML 2013; torch.optim.SGD with dampening 0",
    build="toolkit.optim.sgd:build",
    formula="toolkit.reference.optimizers.sgd:Sgd",
    keys=("kernel", "momentum", "nesterov"),
    defaults={"momentum": 0.9, "nesterov": False},
    lr="0.1 for normalised networks; for transformers it is searched for",
    state=lambda shape, matrix, size: float(elements(shape) * size),
    tensors=lambda optimizer, shape, matrix: ("momentum_buffer",) if optimizer.momentum else (),
    copies=_copies,
    passes=5,
    counts=lambda matrix: False,
    settings=_settings,
    trainer=_trainer,
)
