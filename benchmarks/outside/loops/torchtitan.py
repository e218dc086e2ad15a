"""torchtitan's trainer: a head in eight chunks, each with its backward before the next one.

Read from torchtitan 0.3.0: components/loss.py (``ChunkedLossWrapper``, ``cross_entropy_loss``), trainer.py
(``_forward_backward_body``), distributed/fsdp.py (``apply_fsdp_to_decoder``), models/llama3/config_registry.py. FSDP2
shards each block, the embeddings, and the last norm with the head; parameters are float32 and gathered in bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.outside.loops.decoder import Decoder
from toolkit.model.loss_terms import LossTerms
from toolkit.recipe.resolve import Resolved

CHUNKS = 8
"""``num_chunks``."""


class ChunkedHead(torch.autograd.Function):
    """``hidden`` (rows, length, width), the head's ``weight`` (words, width) and ``labels`` (rows, length) to the loss.
    Every chunk's logits are copied to float32; its gradients are there before the next chunk's logits: those of the
    hidden states in float32, that of the weight as a leaf's."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        parts = [part.contiguous() for part in hidden.detach().tensor_split(CHUNKS, dim=1)]
        of_hidden = torch.zeros(hidden.shape, dtype=torch.float32)
        of_weight = None
        leaf = weight.detach().requires_grad_(weight.requires_grad)
        done = 0
        for part, wanted in zip(parts, labels.tensor_split(CHUNKS, dim=1), strict=True):
            one = part.requires_grad_(True)
            with torch.enable_grad():
                logits = functional.linear(one, leaf)
                flat = logits.flatten(0, 1).float()
                loss = functional.cross_entropy(flat, wanted.flatten(0, 1), reduction="sum")
                del flat
            leaves = [one, leaf] if leaf.requires_grad else [one]
            grads = torch.autograd.grad(loss, leaves)
            del loss, logits
            of_hidden[:, done : done + one.shape[1]] += grads[0]
            done += one.shape[1]
            if len(grads) > 1:
                of_weight = grads[1] if of_weight is None else of_weight.add_(grads[1])
        ctx.save_for_backward(of_hidden.to(hidden.dtype), of_weight)
        return torch.zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        of_hidden, of_weight = ctx.saved_tensors
        return of_hidden, of_weight, None


def chunked_loss(
    model: nn.Module, config: Any, tensors: Mapping[str, torch.Tensor], task: str, terms: LossTerms
) -> torch.Tensor:
    own: Any = model
    loss: torch.Tensor = ChunkedHead.apply(model(tensors["input_ids"]), own.output.weight, tensors["labels"])
    return loss


def build_model(resolved: Resolved) -> nn.Module:
    """The recipe's model as torchtitan builds it, on the meta device. Raises InputError."""
    from toolkit.model.load import build_config

    with torch.device("meta"):
        return Decoder(build_config(resolved), tune=False)
