"""Counts the bytes of all live storages: allocations when they are dispatched, frees when the storages die.

The same code measures a fake trace (the prediction of activations) and real training (the reference for predictions).
It sees what PyTorch's dispatcher allocates, on any device, but not scratch memory inside one operation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch.distributed.tensor import DTensor

from toolkit.optim.adamw8bit import local
from toolkit.trees import leaves
from toolkit.upstream.torch import UncompiledMode


class LiveBytes(UncompiledMode):
    """While entered, ``live`` is the bytes alive of all storages born since, and ``peak`` its highest so far.

    ``owner`` is asked at every birth; ``by_owner`` splits ``live`` by its answers.
    """

    def __init__(self, owner: Callable[[], Any] | None = None, meta: bool = False, limit: int | None = None) -> None:
        super().__init__()
        self.limit = limit
        """Bytes over which it is as if memory were exhausted: torch.OutOfMemoryError where they are asked for."""
        self.meta = meta
        """Whether tensors on the meta device count: in a trace they stand for real ones, elsewhere for nothing."""
        self.live = 0
        self.peak = 0
        self.by_owner: dict[Any, int] = {}
        self._owner = owner or (lambda: None)
        self._known: dict[int, _Storage] = {}
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> Self:
        # FSDP frees gathered weights by setting their storage's size to 0, which no dispatcher sees.
        tracker, original = self, self._resize

        def resize_(storage: torch.UntypedStorage, size: int) -> None:
            original(storage, size)
            tracker._resized(storage)

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def reset_peak(self) -> int:
        """The peak since the last reset; starts the next one from what is alive now."""
        peak, self.peak = self.peak, self.live
        return peak

    def born_before(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note storages that are counted elsewhere: views of them are no births."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._known[id(storage)] = _Storage(storage, None, lambda: None, counted=False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor first turns its operation into those on local tensors
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.dispatched(func, args, kwargs, result)
        for item in (result,) if isinstance(result, torch.Tensor) else leaves(result):
            if isinstance(item, torch.Tensor) and (self.meta or item.device.type != "meta"):
                self._seen(item)
        return result

    def give(self, tensor: torch.Tensor, owner: Any) -> None:
        """Make ``owner`` the one whose bytes a tensor's storage is."""
        entry = self._known.get(id(tensor.untyped_storage()))
        if entry is not None and entry.counted:
            self._count(entry.owner, -entry.size)
            entry.owner = owner
            self._count(owner, entry.size)

    def dispatched(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """One operation, for subclasses that count something else too."""

    def _seen(self, tensor: torch.Tensor) -> None:
        storage = local(tensor).untyped_storage()
        key = id(storage)
        entry = self._known.get(key)
        if entry is not None and entry.reference() is storage:
            self._resized(storage)
            return
        entry = self._known[key] = _Storage(storage, self._owner(), lambda: self._died(key))
        self._count(entry.owner, entry.size)
        if self.limit is not None and self.live > self.limit:
            raise torch.OutOfMemoryError(f"{self.live} bytes, {entry.size} of them just now, of {self.limit}")

    def _resized(self, storage: torch.UntypedStorage) -> None:
        entry = self._known.get(id(storage))
        if entry is not None and entry.counted and (size := storage.nbytes()) != entry.size:
            self._count(entry.owner, size - entry.size)
            entry.size = size

    def _died(self, key: int) -> None:
        entry = self._known.pop(key, None)
        if entry is not None:
            self._count(entry.owner, -entry.size)

    def _count(self, owner: Any, size: int) -> None:
        self.live += size
        self.by_owner[owner] = self.by_owner.get(owner, 0) + size
        self.peak = max(self.peak, self.live)


class _Storage:
    """One storage: how large, whose, and a word when it dies. PyTorch keeps a storage's Python object for as long
    as the storage lives (since 2.1), so a weak reference to it shows that."""

    def __init__(
        self, storage: torch.UntypedStorage, owner: Any, died: Callable[[], None], counted: bool = True
    ) -> None:
        self.size = storage.nbytes()
        self.owner = owner
        self.counted = counted
        self.reference = weakref.ref(storage, lambda _: died())
