"""DDP's gradient buckets in Python, with the collectives of torch's own, which is C++ and reads fake tensors' memory.

The same buckets (torch assigns them), in the same order: a bucket is summed over ranks when the last of its gradients
is there, divided by the ranks before, and written back when all of them are. What stays unseen is the rebuilding of
buckets after the first step, and that sums run beside the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable


class Reducer:
    """Takes the place of ``torch.distributed.Reducer``; what DDP asks of it and no more."""

    def __init__(
        self, parameters: Sequence[torch.Tensor], buckets: Sequence[Sequence[int]], limits: Any, group: Any, *_: Any
    ) -> None:
        self.parameters, self.buckets, self.group = list(parameters), [list(bucket) for bucket in buckets], group
        self._bucket_of = {index: at for at, bucket in enumerate(self.buckets) for index in bucket}
        self._missing: list[int] = []
        self._sums: list[tuple[list[torch.Tensor], torch.Tensor, Any]] = []
        self._syncing = False
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._arrived(index))  # type: ignore[misc]
            for index, parameter in enumerate(self.parameters)
        ]

    def prepare_for_forward(self) -> None: ...

    def prepare_for_backward(self, unused: list[torch.Tensor]) -> None:
        self._missing = [len(bucket) for bucket in self.buckets]
        self._syncing = True

    def set_logger(self, logger: Any) -> None: ...

    def _rebuild_buckets(self) -> bool:
        return False

    def _remove_autograd_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _arrived(self, index: int) -> None:
        if not self._syncing:
            return
        at = self._bucket_of[index]
        self._missing[at] -= 1
        if self._missing[at]:
            return
        grads = [self.parameters[i].grad for i in self.buckets[at]]
        flat = torch.cat([grad.reshape(-1) for grad in grads if grad is not None]).div_(dist.get_world_size(self.group))
        self._sums.append((grads, flat, dist.all_reduce(flat, group=self.group, async_op=True)))  # type: ignore[arg-type]
        if not any(self._missing):
            self._syncing = False
            Variable._execution_engine.queue_callback(self._finish)  # type: ignore[attr-defined]

    def _finish(self) -> None:
        for grads, flat, work in self._sums:
            work.wait()
            for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(part.view_as(grad))
        self._sums = []


class _Logger:
    """DDP's statistics, which nobody reads here."""

    def __init__(self, reducer: Reducer) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def _broadcast(group: Any, tensors: Sequence[torch.Tensor], buffer_bytes: int, source: int = 0) -> None:
    """As one tensor for each dtype and device."""
    alike: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for some in alike.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in some])
        dist.broadcast(flat, group=group, group_src=source)
        for tensor, part in zip(some, flat.split([t.numel() for t in some]), strict=True):
            tensor.copy_(part.view_as(tensor))


def install() -> None:
    """For the rest of this process."""
    dist.Reducer, dist.Logger = Reducer, _Logger  # type: ignore[misc, assignment]
    dist._broadcast_coalesced = _broadcast  # type: ignore[attr-defined]
    dist._verify_params_across_processes = lambda *args: None  # type: ignore[attr-defined]
