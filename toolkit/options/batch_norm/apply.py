"""Batch normalisation under data parallelism: over all ranks' micro-batches, over each rank's own, or frozen.

A layer of torch normalises what one forward holds: a rank's micro-batch. Here it may be the same micro-batch of all
ranks together, which is what one process with the whole micro-batch computes.

Statistics are float32 under every strategy, whatever the weights are cast to, and sums are in float32.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from toolkit.errors import InputError
from toolkit.model.running_statistics import Now, RunningLayer
from toolkit.model.unreached import OWN_FUNCTIONS
from toolkit.optimizers import optimizer_kind
from toolkit.recipe.resolve import Resolved

_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class BatchNorm(RunningLayer):
    """A layer of torch with the same parameters, buffers and names. ``mode``: ``synchronised``, ``local`` or
    ``frozen`` (running statistics also in training). Inputs (batch, channels, ...), outputs in the input's dtype."""

    noun = "batch normalisation"
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    weight: Any
    bias: Any
    running_mean: Any
    running_var: Any
    num_batches_tracked: Any

    def __init__(self, layer: Any, mode: str) -> None:
        super().__init__()
        self.mode, self.eps, self.momentum = mode, layer.eps, layer.momentum
        for name in ("weight", "bias"):
            self.register_parameter(name, getattr(layer, name))
        for name in self.statistics:
            value = getattr(layer, name)
            self.register_buffer(name, value.float() if value is not None and value.is_floating_point() else value)
        self.by_rank = mode == "local"
        self.train(layer.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.running_mean is not None and (self.mode == "frozen" or not self.training):
            return self._with_running(x, self.weight, self.bias)
        if self.mode == "synchronised" and dist.is_initialized() and dist.get_world_size() > 1:
            return self._synchronised(x)
        if not Now.counts and self.running_mean is not None:
            return self._with_running(x, self.weight, self.bias)
        return self._of_this_rank(x)

    def _of_this_rank(self, x: torch.Tensor) -> torch.Tensor:
        with self._updated() as (mean, var, momentum):
            return functional.batch_norm(x, mean, var, _wide(self.weight), _wide(self.bias), True, momentum, self.eps)

    def _with_running(self, x: torch.Tensor, weight: Any, bias: Any) -> torch.Tensor:
        mean, var = self.running_mean, self.running_var
        return functional.batch_norm(x, mean, var, _wide(weight), _wide(bias), False, 0.0, self.eps)

    def _synchronised(self, x: torch.Tensor) -> torch.Tensor:
        # Without rows a rank adds nothing to the sums, and takes part in the collectives. Float32: the message of an
        # empty micro-batch has its input's dtype in torch 2.13.0, the others' have float32.
        counted = x if Now.counts else x[:0].float()
        weight, bias = _wide(self.weight), _wide(self.bias)
        with self._updated() as (mean, var, momentum):
            if x.is_cuda:
                y = self._of_torch(counted, weight, bias, mean, var, momentum)
            else:
                y = _OverRanks.apply(counted, weight, bias, mean, var, momentum, self.eps)
        if Now.counts:
            return y
        # No loss comes of these rows. They pass the layer as they would in evaluation, so that all is finite.
        fixed = [None if p is None else p.detach() for p in (self.weight, self.bias)]
        return self._with_running(x, *fixed) + y.sum().to(x.dtype)

    def _of_torch(self, x: torch.Tensor, weight: Any, bias: Any, mean: Any, var: Any, momentum: float) -> torch.Tensor:
        """torch's ``SyncBatchNorm`` with these tensors, of which it updates ``mean`` and ``var``."""
        tracks = mean is not None
        layer = nn.SyncBatchNorm(x.shape[1], self.eps, momentum, weight is not None, tracks, device="meta")
        tensors = {"weight": weight, "bias": bias, "running_mean": mean, "running_var": var}
        if tracks:  # its own count of batches; ``momentum`` is given
            tensors["num_batches_tracked"] = torch.zeros((), dtype=torch.int64, device=x.device)
        given = {name: value for name, value in tensors.items() if value is not None}
        return torch.func.functional_call(layer, given, (x,), strict=False)

    @contextlib.contextmanager
    def _updated(self) -> Iterator[tuple[torch.Tensor | None, torch.Tensor | None, float]]:
        """Copies of the running statistics, which a forward updates, and by which factor; kept afterwards, but for a
        recomputation. Copies, since a recomputation has to call what the forward did, and autograd saves them."""
        if self.running_mean is None:
            yield None, None, 0.0
            return
        if not Now.recomputing:
            self.num_batches_tracked.add_(1)
        # torch's rule: without a momentum they are the mean over all batches.
        momentum = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        mean, var = self.running_mean.clone(), self.running_var.clone()
        yield mean, var, momentum
        if not Now.recomputing:
            self.running_mean.copy_(mean)
            self.running_var.copy_(var)


class _OverRanks(torch.autograd.Function):
    """What torch's ``SyncBatchNorm`` computes, for devices that torch 2.13.0 has no kernels for («expected input
    tensor to be on GPU»). With the sums over the ``n`` positions of all ranks (Ioffe and Szegedy, arXiv:1502.03167):

    mean = sum(x) / n, var = sum((x - mean)^2) / n, h = (x - mean) / sqrt(var + eps), y = weight h + bias;
    dx = weight / sqrt(var + eps) (dy - sum(dy) / n - h sum(dy h) / n), dweight = sum(dy h), dbias = sum(dy),

    the last two over this rank's own, as the strategy sums gradients over ranks.
    """

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, momentum: float,
                eps: float) -> torch.Tensor:  # fmt: skip
        axes, shape = _axes(x)
        wide = x.float()
        first = torch.cat([wide.sum(axes), wide.new_full((1,), float(x.numel() // x.shape[1]))])
        dist.all_reduce(first)
        count = first[-1].clamp(min=1.0)
        if count.item() == 1:
            raise ValueError("batch normalisation needs more than one value per channel in a micro-batch of all ranks")
        mean = first[:-1] / count
        centred = wide - mean.view(shape)
        squares = centred.square().sum(axes)
        dist.all_reduce(squares)
        var = squares / count
        if running_mean is not None:
            running_mean.lerp_(mean, momentum)
            running_var.lerp_(squares / (count - 1), momentum)
        scale = (var + eps).rsqrt()
        h = centred * scale.view(shape)
        y = h if weight is None else h * weight.view(shape)
        y = y if bias is None else y + bias.view(shape)
        ctx.save_for_backward(h, scale, weight, count)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        h, scale, weight, count = ctx.saved_tensors
        axes, shape = _axes(h)
        dy = outer[0].float()
        own = torch.stack([dy.sum(axes), (dy * h).sum(axes)])
        dbias, dweight = own[0].clone(), own[1].clone()
        dist.all_reduce(own)
        over_all = own / count
        dx = dy - over_all[0].view(shape) - h * over_all[1].view(shape)
        dx = dx * (scale if weight is None else scale * weight).view(shape)
        needed = ctx.needs_input_grad
        return (dx.to(outer[0].dtype), dweight if needed[1] else None, dbias if needed[2] else None,
                None, None, None, None)  # fmt: skip


OWN_FUNCTIONS.add(_OverRanks.__name__)


def _axes(x: torch.Tensor) -> tuple[list[int], list[int]]:
    """All axes but the channels', and the shape of a channel's number beside ``x``."""
    return [0, *range(2, x.dim())], [1, -1, *[1] * (x.dim() - 2)]


def _wide(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.float()


# ---------------------------------------------------------------------- a model's layers


def prepare(model: nn.Module, mode: str, resolved: Resolved) -> None:
    """Replace the layers of a recipe's model. Raises InputError as ``convert`` does, where the recipe asks for a mode
    that no layer has use for, and where running statistics of the training weights would be used with averaged ones.
    """
    found = convert(model, mode, resolved.source)
    if not found and resolved.recipe.model.batch_norm is not None:
        raise InputError(f"{resolved.source}: model.batch_norm: the model has no batch normalisation; remove the key")
    name = resolved.recipe.optimizer.name
    if found and mode != "frozen" and optimizer_kind(name).averages:
        raise InputError(
            f"{resolved.source}: optimizer.name: {name} evaluates and exports averaged weights, and the running "
            "statistics of this model's batch normalisation are those of other weights; set model.batch_norm: frozen, "
            "or use adamw"
        )


def convert(model: nn.Module, mode: str, source: str) -> list[str]:
    """Replace the model's layers of batch normalisation in place; returns their names. New layers have the parameters
    of those they replace, trainable or not. Raises InputError for a layer of a class of the model's own."""
    found: list[str] = []
    for name, module in list(model.named_modules()):
        if not is_batch_norm(module):
            continue
        if type(module) not in _KINDS:
            raise InputError(
                f"{source}: model: {name} is a {type(module).__name__}, batch normalisation of the model's own, which "
                "the toolkit cannot synchronise over ranks; use a model with layer normalisation"
            )
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, BatchNorm(module, mode))
        found.append(name)
    if found:
        _leave_uncompiled()
    return found


def is_batch_norm(module: nn.Module) -> bool:
    """Whether it is one of torch's layers of batch normalisation, or has the statistics of one."""
    if isinstance(module, nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d | BatchNorm):
        return False
    return isinstance(module, _KINDS) or all(hasattr(module, name) for name in BatchNorm.statistics)


@functools.cache
def _leave_uncompiled() -> None:
    """Not where the class is defined: the decorator imports torch's compiler, a second for every other model too."""
    BatchNorm._synchronised = torch.compiler.disable(BatchNorm._synchronised)  # type: ignore[method-assign]
