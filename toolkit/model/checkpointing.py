"""Non-reentrant activation checkpointing of a model's blocks, the same under every strategy.

The block's ``forward`` is replaced on the instance, so that module names do not change (adapters are saved under them)
and hooks on the block (FSDP's gathering) run outside of the recomputed part.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from toolkit.errors import InputError
from toolkit.model.operators import operator_name, schema_of
from toolkit.model.running_statistics import recomputing
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import CheckpointingName
from toolkit.trees import leaves, mapped
from toolkit.upstream.torch import DispatchMode, changes_of, sees_operators

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
    namespace, name = op.name().partition("::")[0], operator_name(op)
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


class Store(Protocol):
    """Where what checkpointed blocks keep waits for their backward. It counts tensors sent there, tensors that came
    back, and bytes sent."""

    moved: int
    returned: int
    bytes_out: int

    def keeping(self) -> contextlib.AbstractContextManager[None]:
        """Context in which what autograd saves goes there."""


def checkpoint_blocks(
    blocks: Sequence[tuple[str, nn.Module]], kind: CheckpointingName, store: Store | None = None
) -> None:
    """Make each block recompute its activations in the backward: all, or all except the expensive ones.

    What a block saves goes to ``store`` until then, if there is one.
    """
    if kind == "none":
        return
    for _, block in blocks:
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True}
        if kind == "selective" and sees_operators():
            options["context_fn"] = keep_products
        block.forward = _Recomputed(block.forward, block, options, store)


def keep_products() -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
    """Contexts of a block's forward and of its recomputation, for ``torch.utils.checkpoint``.

    torch has them too (``create_selective_checkpoint_contexts``). Its own count every operator, marks for the profiler
    among them, and refuse a recomputation that runs one more often than the forward did («not found in storage», torch
    2.13.0). ZeRO-3 does, since what a block gathers depends on what was gathered ahead of it; so does FSDP1, whose
    marks are others while T5's blocks are computed again. These two look at kept products alone.
    """
    kept: _Kept = defaultdict(deque)
    return _KeptApart(kept), _ComputedAgain(kept)


_Kept = dict[Any, deque[Any]]
"""By operator, in the order of its calls, what it gave: the values, each tensor as ``_Tensor``."""


class _Tensor:
    """A kept tensor, without its place in the graph, and how often it had been changed in place by then."""

    def __init__(self, value: torch.Tensor) -> None:
        self.hold(value)

    def hold(self, value: torch.Tensor) -> None:
        self.value, self.changes = value.detach(), changes_of(value)

    def given_back(self) -> torch.Tensor:
        if changes_of(self.value) != self.changes:
            raise RuntimeError("a product that selective checkpointing kept was changed in place")
        return self.value


class _OnKept(DispatchMode):
    """A mode with the products of one block that are kept."""

    def __init__(self, kept: _Kept) -> None:
        super().__init__()
        self.kept = kept

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class _KeptApart(_OnKept):
    """Keeps products, and gives one memory of its own before an operation changes it in place.

    torch 2.13.0 notices such a change by a version counter that ``_unsafe_view`` does not share, and ``matmul`` ends in
    one: after ``y = x @ w; y += b`` the sum is kept instead of the product, recomputation adds ``b`` again, and
    gradients are silently wrong. DeepSpeed 0.19.8's linear of ZeRO-3 does that for every layer with a bias
    (runtime/zero/linear.py).
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = schema_of(func)
        if schema is not None and schema.is_mutable:
            changed = _changed(schema, args, kwargs)
            for one in leaves([list(calls) for calls in self.kept.values()]):
                if isinstance(one, _Tensor) and any(_shares(one.value, tensor) for tensor in changed):
                    one.hold(one.value.clone())
        result = func(*args, **(kwargs or {}))
        if is_costly(func):
            self.kept[func].append(mapped(lambda x: _Tensor(x) if isinstance(x, torch.Tensor) else x, result))
        return result


class _ComputedAgain(_OnKept):
    """Gives kept products back, each once, and runs every other operation."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_costly(func):
            return func(*args, **(kwargs or {}))
        if not self.kept[func]:
            raise RuntimeError(f"{func} is computed again more often than the forward computed it")
        return mapped(lambda x: x.given_back() if isinstance(x, _Tensor) else x, self.kept[func].popleft())


def _changed(schema: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an operator of this schema changes."""
    given = dict(zip([a.name for a in schema.arguments], args, strict=False)) | (kwargs or {})
    written = [given.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [x for x in leaves(written) if isinstance(x, torch.Tensor)]


def _shares(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage() is other.untyped_storage()


class _Recomputed:
    """A block's forward under checkpointing; counts its calls as evidence of recomputation."""

    def __init__(
        self, forward: Callable[..., Any], block: nn.Module, options: dict[str, Any], store: Store | None
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


def stores_of(blocks: Sequence[tuple[str, nn.Module]]) -> list[Store]:
    """The stores of checkpointed blocks, each once."""
    found = [block.forward.store for _, block in blocks if isinstance(block.forward, _Recomputed)]
    return list({id(store): store for store in found if store is not None}.values())


def keep_costly(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """torch's policy for selective checkpointing: expensive results are saved, all others are recomputed."""
    return CheckpointPolicy.MUST_SAVE if is_costly(op) else CheckpointPolicy.PREFER_RECOMPUTE
