"""The loss that labels ask for: their cross-entropy, averaged over all supervised tokens of a step.

`toolkit.Recorder` asks for it. What was recorded of the loop's own loss, its gradient at the logits, is not used then.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from toolkit.tasks.labels import IGNORED

_ROWS = ("input_ids", "attention_mask", "position_ids", "token_type_ids", "labels")


def labels_of(kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The classes that a call of a model was given to predict; None where it was given none."""
    labels = kwargs.get("labels")
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or labels.ndim not in (1, 2):
        return None
    return labels


def supervised(labels: torch.Tensor, following: bool) -> int:
    """Predictions with a label. ``following``: each row predicts its next position."""
    return int((labels[:, 1:] if following else labels).ne(IGNORED).sum())


def seed(
    logits: torch.Tensor,
    labels: torch.Tensor,
    following: bool,
    factor: float,
    shake: torch.Generator | None = None,
    by_sum: bool = False,
) -> torch.Tensor:
    """The gradient of ``factor`` times the sum of the cross-entropies, at ``logits`` of shape (..., classes).

    ``shake``: have it off by a rounding of the logits' dtype, up or down at random, where a softmax rounds: of each
    logit's distance from the largest, and of the result. ``by_sum``: from each row's logsumexp, as libraries compute it
    that keep no logits, in place of torch's cross-entropy (see scripts/answers.py).
    """
    leaf = logits.detach()
    with torch.enable_grad():
        leaf.requires_grad_()
        rows = leaf[:, :-1] if following else leaf
        targets = labels[:, 1:] if following else labels
        classes = rows.float().flatten(0, -2)
        if shake is not None:
            off = _roundings(classes, logits.dtype, shake)
            classes = classes + (classes - classes.amax(-1, keepdim=True)).detach() * off
        wanted = targets.flatten()
        if by_sum:
            chosen = classes.gather(-1, wanted.clamp(min=0).unsqueeze(-1)).squeeze(-1)
            loss = (torch.logsumexp(classes, -1) - chosen).masked_fill(wanted == IGNORED, 0.0).sum()
        else:
            loss = functional.cross_entropy(classes, wanted, ignore_index=IGNORED, reduction="sum")
    gradient = torch.autograd.grad(loss * factor, leaf)[0]
    return gradient if shake is None else gradient + gradient * _roundings(gradient, logits.dtype, shake)


def _roundings(like: torch.Tensor, dtype: torch.dtype, shake: torch.Generator) -> torch.Tensor:
    """Of ``dtype``: one is off by half an eps at most."""
    signs = torch.randint(0, 2, like.shape, generator=shake).mul_(2).sub_(1)
    return signs.to(like) * (torch.finfo(dtype).eps / 2)


def tensors_of(kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What says which samples a call has."""
    given = {name: one.cpu() for name, one in kwargs.items() if isinstance(one, torch.Tensor) and one.ndim}
    if "input_ids" not in given:
        return given
    given.setdefault("attention_mask", torch.ones_like(given["input_ids"]))
    return {name: given[name] for name in _ROWS if name in given}
