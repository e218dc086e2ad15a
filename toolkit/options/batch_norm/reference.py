"""Batch normalisation of the plain loop, and forwards of several ranks' micro-batches that meet at its layers.

What the recipe's ranks compute at the same time, the plain loop computes as one micro-batch: each rank's rows with the
dropout masks and the padding of that rank, normalised by statistics over all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from toolkit.reference.meeting import Meeting
from toolkit.reference.option import PlainOption

_RUNNING = ("running_mean", "running_var", "num_batches_tracked")


class PlainBatchNorm(nn.Module):
    """A layer with the parameters and buffers of torch's. It computes as in training, whatever its mode, where a
    micro-batch ``counts``. ``mode``: as ``model.batch_norm``."""

    running_mean: Any
    running_var: Any
    num_batches_tracked: Any

    def __init__(self, layer: Any, mode: str) -> None:
        super().__init__()
        self.mode, self.eps, self.momentum = mode, layer.eps, layer.momentum
        self.weight, self.bias = layer.weight, layer.bias
        for name in _RUNNING:
            value = getattr(layer, name)
            self.register_buffer(name, value.float() if value is not None and value.is_floating_point() else value)
        self.meeting: Meeting | None = None
        self.rank = 0
        self.counts = False
        """Whether there is a micro-batch, with samples."""
        self.updates = True
        """Whether it changes the running statistics: with ``local`` they are those of rank 0."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = None if self.weight is None else self.weight.float()
        bias = None if self.bias is None else self.bias.float()
        if self.mode == "frozen" or (self.meeting is None and not self.counts and self.running_mean is not None):
            return functional.batch_norm(x, self.running_mean, self.running_var, weight, bias, False, 0.0, self.eps)
        if self.meeting is not None:
            return normalised(self.meeting, self, x, weight, bias)
        mean, var, momentum = self.running()
        return functional.batch_norm(x, mean, var, weight, bias, True, momentum, self.eps)

    def running(self) -> tuple[torch.Tensor | None, torch.Tensor | None, float]:
        """The running statistics to update, and by which factor; counts the batch."""
        if self.running_mean is None or not self.updates:
            return None, None, 0.0
        self.num_batches_tracked += 1
        momentum = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        return self.running_mean, self.running_var, momentum


class _Together(torch.autograd.Function):
    """Normalises the rows of all ranks by their common mean and variance (arXiv:1502.03167, algorithm 1), in float32.

    Arguments: eps, which ranks count, then x, weight, bias of each rank. Returns y of each rank, mean, sum of squares,
    positions.
    """

    @staticmethod
    def forward(ctx: Any, eps: float, counts: tuple[bool, ...], *given: Any) -> Any:
        xs, weights, biases = given[::3], given[1::3], given[2::3]
        axes, shape = [0, *range(2, xs[0].dim())], [1, -1, *[1] * (xs[0].dim() - 2)]
        ctx.axes, ctx.shape, ctx.counts = axes, shape, counts
        wide = [x.float() for x in xs]
        inside = [x for x, counted in zip(wide, counts, strict=True) if counted]
        positions = torch.tensor(float(sum(x.numel() // x.shape[1] for x in inside)), device=xs[0].device)
        mean = _sum([x.sum(axes) for x in inside]) / positions
        squares = _sum([(x - mean.view(shape)).square().sum(axes) for x in inside])
        scale = (squares / positions + eps).rsqrt()
        normal = [(x - mean.view(shape)) * scale.view(shape) for x in wide]
        ctx.normal, ctx.scale, ctx.weights, ctx.positions = normal, scale, weights, positions
        ys = []
        for x, h, weight, bias in zip(xs, normal, weights, biases, strict=True):
            y = h if weight is None else h * weight.view(shape)
            y = y if bias is None else y + bias.view(shape)
            ys.append(y.to(x.dtype))
        ctx.mark_non_differentiable(mean, squares, positions)
        return (*ys, mean, squares, positions)

    @staticmethod
    def backward(ctx: Any, *outer: Any) -> Any:
        axes, shape = ctx.axes, ctx.shape
        dys = [dy.float() for dy in outer[: len(ctx.normal)]]
        sums = [(dy.sum(axes), (dy * h).sum(axes)) for dy, h in zip(dys, ctx.normal, strict=True)]
        inside = [both for both, counted in zip(sums, ctx.counts, strict=True) if counted]
        mean_dy = _sum([both[0] for both in inside]) / ctx.positions
        mean_dyh = _sum([both[1] for both in inside]) / ctx.positions
        found: list[Any] = [None, None]
        for at, (dy, h, weight) in enumerate(zip(dys, ctx.normal, ctx.weights, strict=True)):
            dx = dy - mean_dy.view(shape) - h * mean_dyh.view(shape) if ctx.counts[at] else dy
            dx = dx * (ctx.scale if weight is None else ctx.scale * weight).view(shape)
            found += [dx.to(outer[at].dtype), sums[at][1] if weight is not None else None]
            found.append(sums[at][0] if ctx.needs_input_grad[4 + 3 * at] else None)
        return tuple(found)


def _sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total


def normalised(meeting: Meeting, layer: PlainBatchNorm, x: torch.Tensor, weight: Any, bias: Any) -> torch.Tensor:
    """The layer's output for its rank, once all ranks are there."""

    def together(there: list[Any]) -> list[torch.Tensor]:
        first = there[0][0]
        counts = tuple(layer.counts for layer, *_ in there)
        *ys, mean, squares, positions = _Together.apply(first.eps, counts, *[part for _, *own in there for part in own])
        if (into := first.running())[0] is not None:
            into[0].lerp_(mean, into[2])
            into[1].lerp_(squares / (positions - 1), into[2])
        return ys

    found: torch.Tensor = meeting.meet(layer.rank, (layer, x, weight, bias), together)
    return found


@dataclass(frozen=True)
class PlainStatistics(PlainOption):
    """``mode``: as ``model.batch_norm``."""

    mode: str

    def change(self, model: nn.Module, resolved: Any) -> None:
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm):
                parent, _, own = name.rpartition(".")
                setattr(model.get_submodule(parent), own, PlainBatchNorm(module, self.mode))

    @contextlib.contextmanager
    def on_rank(self, model: nn.Module, rank: int, samples: bool, meeting: Meeting | None) -> Iterator[None]:
        layers = plain_layers(model).values()
        for layer in layers:
            layer.mode, layer.rank, layer.counts = self.mode, rank, samples
            layer.meeting = meeting if self.mode == "synchronised" else None
            layer.updates = layer.meeting is not None or rank == 0
        try:
            yield
        finally:
            for layer in layers:
                layer.meeting, layer.counts = None, False

    def couples(self, model: nn.Module) -> Literal["", "rank", "ranks"]:
        if self.mode == "frozen" or not plain_layers(model):
            return ""
        return "ranks" if self.mode == "synchronised" else "rank"

    def running(self, model: nn.Module) -> dict[str, torch.Tensor]:
        named = {
            f"{name}.{key}": getattr(layer, key) for name, layer in plain_layers(model).items() for key in _RUNNING
        }
        return {name: value for name, value in named.items() if value is not None}

    def notes(self, model: nn.Module, resolved: Any) -> list[str]:
        if self.couples(model) != "rank" or resolved.data_size == 1:
            return []
        return [
            f"model.batch_norm: local: each of {resolved.data_size} ranks normalises its own micro-batch, here as in "
            "the plain loop; this is another training than the full batch's"
        ]

    def mistakes(self) -> list[tuple[str, dict[str, object], PlainOption]]:
        if self.mode != "synchronised":
            return []
        return [("batch-statistics-of-each-rank", {}, PlainStatistics("local"))]


def plain(settings: str) -> PlainStatistics:
    return PlainStatistics(settings)


def plain_layers(model: nn.Module) -> dict[str, PlainBatchNorm]:
    """The layers by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, PlainBatchNorm)}
