"""Adafactor: the second moment as one mean per row and one per column."""

from __future__ import annotations

from typing import Any

from toolkit.optimizers.base import OptimizerKind, elements, needs_whole_tensors


def _state(shape: tuple[int, ...], matrix: bool, size: int) -> float:
    if len(shape) < 2:
        return float(elements(shape) * size)
    return float((elements(shape) // shape[-1] + elements(shape) // shape[-2]) * size)


def _temporary(shape: tuple[int, ...], matrix: bool, size: int, ranks: int) -> float:
    """The peak of torch.optim.Adafactor's step (torch 2.13.0, _adafactor.py): two tensors of the weight's size, the
    variance estimate and the update. Sharded: the gathered weight and gradient too."""
    return elements(shape) * size * (2 if ranks == 1 else 4)


def _settings(optimizer: Any) -> str:
    return (
        "the step is relative to a weight's size: min(lr, 1/sqrt(update)) x max(1e-3, RMS of the weight), with lr as "
        "the largest relative step (the paper has 0.01)"
    )


OPTIMIZER = OptimizerKind(
    name="adafactor",
    title="Adafactor with factored second moments",
    source="Shazeer and Stern, arXiv:1804.04235, algorithms 4 and 5, as torch.optim.Adafactor",
    build="toolkit.optim.adafactor:build",
    formula="toolkit.reference.optimizers.adafactor:Adafactor",
    keys=("beta2_decay", "clip_threshold"),
    defaults={"beta2_decay": -0.8, "clip_threshold": 1.0},
    lr="0.01, the largest relative step",
    refusal=needs_whole_tensors("adafactor's factored moments are means over whole rows and columns"),
    gathers=lambda matrix: 2,
    factored=True,
    state=_state,
    tensors=lambda optimizer, shape, matrix: ("row_var", "col_var") if len(shape) > 1 else ("variance",),
    temporary=_temporary,
    settings=_settings,
)
