"""The fused loss in a trace: the toolkit's own chunks, on tensors without memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from toolkit.model import head_loss
from toolkit.model.loss_terms import CHUNK_BYTES, CROSS_ENTROPY, LossTerms
from toolkit.recipe.resolve import Resolved


@contextlib.contextmanager
def acted_head(model: nn.Module, resolved: Resolved, device: str, rows: int) -> Iterator[None]:
    """Let the head of ``model`` answer with the loss of full rows, ``rows`` of them, as it does on ``device``.

    Raises InputError if the head is none that can.
    """
    head_loss.fuse_head(model, resolved)
    fused = [module for module in model.modules() if isinstance(module.forward, head_loss.HeadLoss)]
    for module in fused:
        forward: Any = module.forward
        forward.kernel = "chunked"

    def acted(
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        terms: LossTerms = CROSS_ENTROPY,
    ) -> torch.Tensor:
        """``linear_cross_entropy`` where nobody can look which tokens are supervised: all but the last of a row."""
        half = torch.is_autocast_enabled("cpu")
        dtype = torch.get_autocast_dtype("cpu") if half else weight.dtype
        if device == "cpu":
            kept = torch.zeros(targets.numel() - rows, dtype=torch.int64)
            hidden, targets = hidden.index_select(0, kept), targets.index_select(0, kept)
        factor, wanted = head_loss.known_factor(), torch.is_grad_enabled()
        return head_loss._ChunkedLoss.apply(hidden, weight, bias, targets, factor, dtype, wanted, terms)

    right, chunk = head_loss.linear_cross_entropy, dict(CHUNK_BYTES)
    head_loss.linear_cross_entropy = acted
    # Tensors of a trace are on the meta device or a fake CPU.
    CHUNK_BYTES.update(dict.fromkeys(("cpu", "meta", "cuda"), chunk[device]))
    try:
        yield
    finally:
        head_loss.linear_cross_entropy = right
        CHUNK_BYTES.clear()
        CHUNK_BYTES.update(chunk)
        for module in fused:
            module.__dict__.pop("forward", None)
