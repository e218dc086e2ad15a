"""Non-reentrant activation checkpointing of a model's blocks, the same under every strategy.

The block's ``forward`` is replaced on the instance, so that module names do not change (adapters are saved under them)
and hooks on the block (FSDP's gathering) run outside of the recomputed part.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from toolkit.errors import InputError
from toolkit.model.activation_offload import HostStore
from toolkit.model.batch_norm import recomputing
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import CheckpointingName

# Results worth keeping: matrix products and attention cost the most to compute again. By name: what is not there in
# one version of torch, or comes with a package, needs no case of its own.
_PRODUCTS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "linear", "convolution", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm",
     "_int_mm", "_addmm_activation"}
)  # fmt: skip
_ATTENTION = frozenset(
    {"_flash_attention_forward", "_efficient_attention_forward", "_cudnn_attention_forward", "_varlen_attn"}
)


@functools.cache
def is_costly(op: Any) -> bool:
    """Whether an operator is a matrix product or an attention, torch's own or flash-attn's."""
    namespace, _, name = op.name().partition("::")
    name = name.partition(".")[0]
    if "flash_attn" in namespace:  # flash_attn, flash_attn_3, and kernels of the hub named after them
        return "fwd" in name or "forward" in name
    return name in _PRODUCTS | _ATTENTION or (
        name.startswith("_scaled_dot_product_") and "attention" in name and "backward" not in name
    )


def find_blocks(model: nn.Module, resolved: Resolved) -> list[tuple[str, nn.Module]]:
    """The model's repeated blocks by class name, in model order: those of the recipe's classes that it has (a Jamba of
    few layers has one kind of two). Raises InputError, with the available classes, if it has none of them, or not one
    that ``strategy.wrap`` names."""
    classes, source = resolved.blocks, resolved.source
    found = [(name, module) for name, module in model.named_modules() if type(module).__name__ in classes]
    seen = {type(module).__name__ for _, module in found}
    absent = [name for name in classes if name not in seen]
    if not found or (absent and resolved.recipe.strategy.wrap):
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        inside = sorted({type(child).__name__ for modules in lists for child in modules})
        wanted = ", ".join(absent) or "none known"
        raise InputError(
            f"{source}: strategy.wrap: the model has no block of class {wanted}; "
            f"its repeated modules are of class: {', '.join(inside) or 'none'}"
        )
    return found


def checkpoint_blocks(
    blocks: Sequence[tuple[str, nn.Module]], kind: CheckpointingName, store: HostStore | None = None
) -> None:
    """Make each block recompute its activations in the backward: all, or all except the expensive ones.

    What a block saves goes to ``store`` until then, if there is one.
    """
    if kind == "none":
        return
    for _, block in blocks:
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True}
        if kind == "selective":
            _ignore_marks()
            options["context_fn"] = keep_products
        block.forward = _Recomputed(block.forward, block, options, store)


def _ignore_marks() -> None:
    """torch 2.13.0 holds every operator of a recomputed block against those of its forward, marks for the profiler
    among them; FSDP1 makes others while T5's blocks are computed again («not found in storage»)."""
    from torch.utils.checkpoint import SAC_IGNORED_OPS

    marks = torch.ops.profiler
    SAC_IGNORED_OPS.update({marks._record_function_enter_new.default, marks._record_function_exit._RecordFunction})


def keep_products() -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
    """Contexts of a block's forward and of its recomputation, for ``torch.utils.checkpoint``."""
    caching, _ = create_selective_checkpoint_contexts(keep_costly)
    return _KeptApart(keep_costly, caching.storage), _ComputedAgain(keep_costly, caching.storage)


class _KeptApart(_CachingTorchDispatchMode):
    """Gives a kept product memory of its own before an operation changes it in place.

    torch 2.13.0 notices such a change by a version counter that ``_unsafe_view`` does not share, and ``matmul`` ends in
    one: after ``y = x @ w; y += b`` the sum is kept instead of the product, recomputation adds ``b`` again, and
    gradients are silently wrong. DeepSpeed 0.19.8's linear of ZeRO-3 does that for every layer with a bias
    (runtime/zero/linear.py).
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            for kept in tree_leaves(self.storage):
                value = getattr(kept, "val", None)
                if isinstance(value, torch.Tensor) and any(_shares(value, x) for x in _changed(schema, args, kwargs)):
                    kept.val = value.clone()
                    kept.version = kept.val._version
        if not is_costly(func):  # nothing of it is kept; see _ComputedAgain
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


class _ComputedAgain(_CachedTorchDispatchMode):
    """Gives kept products back, and runs every other operation.

    torch 2.13.0 counts those as well, and refuses a recomputation that runs one more often than the forward did. ZeRO-3
    does: what a block gathers depends on what was gathered ahead of it, and the copies run inside of the block.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_costly(func):
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


def _changed(schema: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an operator of this schema changes."""
    given = dict(zip([a.name for a in schema.arguments], args, strict=False)) | (kwargs or {})
    written = [given.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [x for x in tree_leaves(written) if isinstance(x, torch.Tensor)]


def _shares(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


class _Recomputed:
    """A block's forward under checkpointing; counts its calls as evidence of recomputation."""

    def __init__(
        self, forward: Callable[..., Any], block: nn.Module, options: dict[str, Any], store: HostStore | None
    ) -> None:
        self.store = store
        self.forward = forward
        self.block = block
        self.options = options
        self.calls = 0
        self._forward_runs = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.block.training and torch.is_grad_enabled()):
            return self.forward(*args, **kwargs)
        # torch saves a checkpoint's positional tensors as any operation saves its inputs, within these hooks; what the
        # block itself saves is dropped by hooks of its own.
        self._forward_runs = True
        try:
            with contextlib.nullcontext() if self.store is None else self.store.keeping():
                return checkpoint(self._counted, *args, **self.options, **kwargs)
        finally:
            self._forward_runs = False

    def _counted(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self._forward_runs:
            return self.forward(*args, **kwargs)
        with recomputing():
            return self.forward(*args, **kwargs)


def recomputed_calls(blocks: Sequence[tuple[str, nn.Module]]) -> list[int]:
    """Number of calls of each checkpointed block; twice its forwards once the backward has recomputed it."""
    return [block.forward.calls for _, block in blocks if isinstance(block.forward, _Recomputed)]


def host_stores(blocks: Sequence[tuple[str, nn.Module]]) -> list[HostStore]:
    """The stores of checkpointed blocks, each once."""
    found = [block.forward.store for _, block in blocks if isinstance(block.forward, _Recomputed)]
    return list({id(store): store for store in found if store is not None}.values())


def keep_costly(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """torch's policy for selective checkpointing: expensive results are saved, all others are recomputed."""
    return CheckpointPolicy.MUST_SAVE if is_costly(op) else CheckpointPolicy.PREFER_RECOMPUTE
