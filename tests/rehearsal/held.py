"""Bytes of tensors that exist at the same time, by device: of fake tensors, which take none."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode

from rehearsal.watch import PLAIN, device_of, tensors_in

_PROPAGATES, _SHAPE = ShardingPropagator, "_propagate_tensor_meta_non_cached"


class Held(TorchDispatchMode):
    """Inside, ``now`` and ``most`` are the bytes of all storages, by type of device. One that is shared counts once."""

    def __init__(self) -> None:
        super().__init__()
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self._sizes: dict[int, tuple[str, int]] = {}
        self._shapes_alone = False
        self._patches = [
            # Resizing is no operator.
            mock.patch.object(torch.UntypedStorage, "resize_", self._resizing(torch.UntypedStorage.resize_)),
            # DTensor asks for the shape of a result with whole fake tensors, where there are real ones, too.
            mock.patch.object(_PROPAGATES, _SHAPE, self._without(getattr(_PROPAGATES, _SHAPE))),
        ]

    def __enter__(self) -> Held:
        for patch in self._patches:
            patch.start()
        super().__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        for patch in self._patches:
            patch.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not set(types) <= set(PLAIN):
            return NotImplemented  # a DTensor: what it is made of comes by itself
        answer = func(*args, **(kwargs or {}))
        if self._shapes_alone:
            return answer
        for tensor in tensors_in((answer,)):
            with torch._C._DisableTorchDispatch():
                self.see(tensor.untyped_storage(), device_of(tensor).type)
        return answer

    def see(self, storage: torch.UntypedStorage, device: str) -> None:
        """A storage that is there now, with the size that it has now."""
        key = storage._cdata
        before = self._sizes.get(key, (device, 0))[1]
        if key not in self._sizes:
            weakref.finalize(storage, self._gone, key).atexit = False
        self._sizes[key] = device, storage.nbytes()
        self._add(device, storage.nbytes() - before)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """It was resized; unseen ones are not counted."""
        if storage._cdata in self._sizes:
            self.see(storage, self._sizes[storage._cdata][0])

    def _gone(self, key: int) -> None:
        device, size = self._sizes.pop(key)
        self._add(device, -size)

    def _add(self, device: str, size: int) -> None:
        self.now[device] += size
        self.most[device] = max(self.most[device], self.now[device])

    def _resizing(self, resize: Any) -> Any:
        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            answer = resize(storage, size)
            self.resized(storage)
            return answer

        return resize_

    def _without(self, function: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            before, self._shapes_alone = self._shapes_alone, True
            try:
                return function(*args, **kwargs)
            finally:
                self._shapes_alone = before

        return called
