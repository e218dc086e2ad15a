"""Stages of consecutive blocks, in the plain loop: dropout masks of their own, and the order of a shared weight's sums.

The plain loop computes the whole model. Where a candidate's stages draw masks from seeds of their own, it sets the
seed of a stage in front of its first block. Where an embedding and a head share a weight, it adds up their two
gradients over micro-batches and ranks before it adds them to each other, as two stages do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

HEAD = " of the head"
"""Behind the name of a shared weight: the head's part of its gradient."""


@contextlib.contextmanager
def in_stages(
    model: Any, blocks: Sequence[nn.Module], starts: Sequence[int], seed: Callable[[int], None]
) -> Iterator[dict[str, nn.Parameter]]:
    """Inside, ``seed(stage)`` is called before the first block of every stage but the first. ``starts``: numbers of the
    first blocks. Gives what stands for the head's part of a shared weight, by that weight's name, for ``backward``."""
    if len(starts) < 2:
        yield {}
        return

    def before(stage: int) -> Callable[..., None]:
        return lambda module, args: seed(stage)

    handles = [blocks[at].register_forward_pre_hook(before(stage)) for stage, at in enumerate(starts) if stage]
    own: dict[str, nn.Parameter] = {}
    head = _linear_of(model.get_output_embeddings())
    shared: nn.Parameter = head.weight
    name = next(n for n, p in model.named_parameters() if p is shared)
    if shared.requires_grad and _is_shared(model, shared):
        own[name] = head.weight = nn.Parameter(shared.detach())
    try:
        yield own
    finally:
        for handle in handles:
            handle.remove()
        if own:
            head.weight = shared


def joined_heads(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``gradients``, with the two parts of a shared weight's added up."""
    found = {name: gradient for name, gradient in gradients.items() if not name.endswith(HEAD)}
    for name in gradients.keys() - found.keys():
        weight = name.removesuffix(HEAD)
        found[weight] = found[weight] + gradients[name] if weight in found else gradients[name]
    return found


def _is_shared(model: nn.Module, parameter: nn.Parameter) -> bool:
    return sum(p is parameter for _, p in model.named_parameters(remove_duplicate=False)) > 1


def _linear_of(head: Any) -> Any:
    """The linear layer of a head, inside what an adapter puts around it."""
    kept = getattr(head, "modules_to_save", None)
    head = kept["default"] if kept is not None else head
    return getattr(head, "base_layer", head)
