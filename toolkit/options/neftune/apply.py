"""NEFTune: uniform noise on the input embeddings while training (Jain et al., arXiv:2310.05914).

Each number of a sample's embeddings gets noise from [-1, 1], times alpha / sqrt(L d): L is the sample's own number of
tokens, d the width. The noise is drawn first in each forward, from the generator that ``seed_micro_batch`` has seeded.
Like dropout masks it is a function of (seed, step, micro-batch, rank).

transformers and TRL (``neftune_post_forward_hook``) take for L the padded length of the batch, or all of a packed row:
there a sample's noise depends on the samples beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_ATTRIBUTE = "embedding_noise"


class EmbeddingNoise:
    """Hooks of one model. ``calls``: forwards with noise, as evidence."""

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha
        self.calls = 0
        self._tensors: Mapping[str, Any] = {}

    def before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Note what the model is given: the lengths of its samples."""
        self._tensors = kwargs

    def after(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        """The embeddings (batch, length, width) with noise, in their dtype; as they are outside of training."""
        if not module.training:
            return output
        self.calls += 1
        scale = noise_scale(self._tensors, self.alpha, output.shape[-1]).unsqueeze(-1)
        noise = torch.rand(output.shape, device=output.device, dtype=torch.float32).mul_(2).sub_(1).mul_(scale)
        return output + noise.to(output.dtype)


def noise_scale(tensors: Mapping[str, Any], alpha: float, width: int) -> torch.Tensor:
    """alpha / sqrt(L d) at each token, 0 at padding: float32 (batch, length), computed without waiting for the device.

    ``tensors``: ``attention_mask``, or ``position_ids`` of packed rows, which are 0 where a sample begins.
    """
    mask, positions = tensors.get("attention_mask"), tensors.get("position_ids")
    if mask is not None:
        lengths = mask.sum(-1, keepdim=True).expand_as(mask)
    elif positions is not None:
        # The samples of a row numbered from 1, and the tokens of each number.
        number = (positions == 0).cumsum(-1)
        counts = torch.zeros((len(positions), positions.shape[1] + 1), dtype=torch.int64, device=positions.device)
        lengths = counts.scatter_add_(1, number, torch.ones_like(number)).gather(1, number)
    else:
        ids = tensors["input_ids"]
        lengths = torch.full_like(ids, ids.shape[1])
    scale = (alpha / (lengths.clamp(min=1).double() * width).sqrt()).float()
    return scale if mask is None else scale * mask


def apply(model: nn.Module, settings: float) -> None:
    """Have ``model`` add noise to its input embeddings in training mode."""
    noise = EmbeddingNoise(settings)
    table: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
    model.register_forward_pre_hook(noise.before, with_kwargs=True)
    table.register_forward_hook(noise.after)
    setattr(table, _ATTRIBUTE, noise)


def calls(model: nn.Module) -> int:
    """How many forwards of ``model`` had noise."""
    return sum(vars(module)[_ATTRIBUTE].calls for module in model.modules() if _ATTRIBUTE in vars(module))
