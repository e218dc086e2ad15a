"""Activation checkpointing of a model's blocks, non-reentrant, the same under every strategy.

The block's ``forward`` is replaced on the instance, so that module names stay as they are (adapters are saved
under them) and hooks on the block (FSDP's gathering) run outside the recomputed part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from toolkit.errors import InputError
from toolkit.recipe.schema import CheckpointingName

# Results worth keeping: matrix products and attention cost the most to compute again.
_KEPT = frozenset(
    op
    for name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
    if (op := getattr(getattr(torch.ops.aten, name, None), "default", None)) is not None
)


def find_blocks(model: nn.Module, classes: Sequence[str], source: str) -> list[tuple[str, nn.Module]]:
    """The model's repeated blocks by class name, in the order of the model.

    Raises InputError where a class is not in the model, naming those that are.
    """
    found = [(name, module) for name, module in model.named_modules() if type(module).__name__ in classes]
    seen = {type(module).__name__ for _, module in found}
    absent = [name for name in classes if name not in seen]
    if not found:
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        inside = sorted({type(child).__name__ for modules in lists for child in modules})
        wanted = ", ".join(absent) or "none known"
        raise InputError(
            f"{source}: strategy.wrap: the model has no block of class {wanted}; "
            f"its repeated modules are of class: {', '.join(inside) or 'none'}"
        )
    return found


def checkpoint_blocks(blocks: Sequence[tuple[str, nn.Module]], kind: CheckpointingName) -> None:
    """Make each block recompute its activations in the backward: all of them, or all but the costly ones."""
    if kind == "none":
        return
    for _, block in blocks:
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True}
        if kind == "selective":
            options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep_costly)
        block.forward = _Recomputed(block.forward, block, options)


class _Recomputed:
    """A block's forward under checkpointing; counts its calls, so that recomputation can be proven."""

    def __init__(self, forward: Callable[..., Any], block: nn.Module, options: dict[str, Any]) -> None:
        self.forward = forward
        self.block = block
        self.options = options
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.block.training and torch.is_grad_enabled()):
            return self.forward(*args, **kwargs)
        return checkpoint(self._counted, *args, **self.options, **kwargs)

    def _counted(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.forward(*args, **kwargs)


def recomputed_calls(blocks: Sequence[tuple[str, nn.Module]]) -> list[int]:
    """How often each checkpointed block ran; twice its forwards once the backward has recomputed it."""
    return [block.forward.calls for _, block in blocks if isinstance(block.forward, _Recomputed)]


def _keep_costly(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
