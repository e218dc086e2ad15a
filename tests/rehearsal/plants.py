"""Defects, planted in every micro-batch's loss, that the rehearsal must report. Each is a line that someone could write
and that runs without an error on a CPU."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from rehearsal.watch import COPY, CPU_IN_NCCL, DEVICES, KERNEL, READ, Report, Watch
from toolkit.training import loop


def _scaled(loss: torch.Tensor, inner: int) -> torch.Tensor:
    left = torch.ones(16, inner, device=loss.device).to(torch.float8_e4m3fn)
    right = torch.ones(16, inner, device=loss.device).to(torch.float8_e4m3fn).t()
    one = torch.ones((), device=loss.device)
    return torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


def _nccl() -> Any:
    return dist.new_group(backend="nccl")  # the toolkit's own group has gloo for the host beside it


def _two_lists(loss: torch.Tensor) -> None:
    torch._foreach_add_([torch.ones((), device=loss.device)], [torch.ones(())])


PLANTS: dict[str, tuple[str, Callable[[torch.Tensor], Any]]] = {
    "sum over NCCL": (CPU_IN_NCCL, lambda loss: dist.all_reduce(torch.ones(1), group=_nccl())),
    "broadcast over NCCL": (CPU_IN_NCCL, lambda loss: dist.broadcast(torch.ones(3), src=0, group=_nccl())),
    "sum with the host": (DEVICES, lambda loss: torch.ones(2, device=loss.device) + torch.ones(2)),
    "another GPU": (DEVICES, lambda loss: torch.ones(2, device=loss.device) + torch.ones(2, device="cuda:3")),
    "lists of two devices": (DEVICES, _two_lists),
    "to the host": (COPY, lambda loss: loss.detach().cpu()),
    "from the host": (COPY, lambda loss: torch.ones(4).to(loss.device)),
    "from memory not pinned": (COPY, lambda loss: torch.ones(4).to(loss.device, non_blocking=True)),
    "a number": (COPY, lambda loss: torch.tensor(1.0, device=loss.device)),
    "no kernel": (KERNEL, lambda loss: torch.histogram(loss.detach().reshape(1), 4)),
    "float8 of 24": (KERNEL, lambda loss: _scaled(loss, 24)),
    "item": (READ, lambda loss: loss.item()),
    "bool": (READ, lambda loss: bool(loss > 0)),
    "format": (READ, lambda loss: f"{loss:.3f}"),
    "nonzero": (READ, lambda loss: (loss.reshape(1) > 0).nonzero()),
    "mask": (READ, lambda loss: loss.reshape(1)[loss.reshape(1) > 0]),
    "item without gradients": (READ, lambda loss: _without_gradients(loss)),
    "synchronize": (READ, lambda loss: torch.cuda.synchronize()),
}
"""What is to be reported of each, and what it does with the loss."""


@torch.inference_mode()
def _without_gradients(loss: torch.Tensor) -> Any:
    """Here autograd hands ``item`` over whole."""
    return loss.new_ones(()).item()


@contextlib.contextmanager
def planted(watch: Watch, made: dict[str, Counter[Report]]) -> Iterator[None]:
    """Every defect, one after another, in each micro-batch inside; ``made``: what each of them was reported as."""
    right = loop.loss_sum

    def loss_sum(*args: Any) -> torch.Tensor:
        loss = right(*args)
        for name, (_, defect) in PLANTS.items():
            before = watch.reports.copy()
            with contextlib.suppress(RuntimeError, NotImplementedError):  # a GPU would refuse some of them
                defect(loss)
            made.setdefault(name, Counter()).update(watch.reports - before)
        return loss

    loop.loss_sum = loss_sum
    try:
        yield
    finally:
        loop.loss_sum = right
