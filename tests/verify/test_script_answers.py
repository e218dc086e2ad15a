"""What a model with TRL's fused head answers, made again from logits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from toolkit.verification.scripts.answers import answer

CLASSES, SURE = 49152, 7


class Head(nn.Module):
    """The head of a pretrained model that is sure of one class among many."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(CLASSES, 16) * 0.02)
        self.bias = nn.Parameter(torch.randn(CLASSES))
        with torch.no_grad():
            self.bias[SURE] = 14.0

    def forward(self, hidden: torch.Tensor) -> Any:
        return SimpleNamespace(logits=hidden @ self.weight.T + self.bias)


def gradient(dtype: torch.dtype, draw: torch.Generator | None = None) -> torch.Tensor:
    """Of the hidden states, in float64."""
    head = Head().to(dtype)
    hidden = (torch.randn(1, 17, 16) * 0.1).to(dtype).requires_grad_()
    labels = torch.full((1, 17), SURE)
    if dtype == torch.float64:
        rows = head(hidden).logits[:, :-1]
        (-torch.log_softmax(rows, -1)[..., SURE].mean()).backward()
    else:
        answer(head, [hidden], {"fused_lm_head": True, "labels": labels}, draw)["loss"].backward()
    assert hidden.grad is not None
    return hidden.grad.double()


def off(found: torch.Tensor) -> float:
    right = gradient(torch.float64)
    return ((found - right).norm() / right.norm()).item()


def test_the_gradient_is_right_where_a_model_is_sure_of_one_of_many_classes() -> None:
    """Of log_softmax it is 2.3e-5 off on a CPU (torch 2.13.0): a script that computes better was called different."""
    assert off(gradient(torch.float32)) < 1e-5


def test_another_rounding_of_the_normaliser_is_allowed_for() -> None:
    plain = gradient(torch.float32)
    other = gradient(torch.float32, torch.Generator().manual_seed(1))
    apart = ((other - plain).norm() / plain.norm()).item()
    # The rounding of a sum near 14, over the 4 % that are left of the gradient.
    assert 5e-6 < apart < 5e-4
    assert off(other) < 5e-4
