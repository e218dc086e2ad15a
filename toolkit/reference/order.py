"""The order in which a candidate computes what the plain loop computes.

Sums in another order are equally correct, but in 16 bits they round to other numbers, and what is computed from those
differs by a percent. Where the plain loop takes the candidate's order, its numbers are the candidate's but for the sums
over micro-batches and ranks. That an order changes nothing else is shown in float32, where orders differ by 1e-6.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class Order:
    """``divisor``: the loss is multiplied by it before the backward, the gradient divided by it after (strategies
    average over data-parallel ranks). ``first``: gradients are summed over a rank's micro-batches first («rank»), or
    over the ranks of each micro-batch («micro»), and those sums then; or each rank adds a micro-batch to the average so
    far, and these are summed over the ranks («average»). ``by_module``: the parts of a hidden state's
    gradient are summed within each module first. ``by_block``: within each of the model's blocks. ``fused``: softmax
    as quotients, of supervised tokens alone. ``in_parts``: each row's tokens in parts, which meet in attention.
    ``columns``: how many parts the matrices of each layer are computed in, whose sums are added up. ``stages``: the
    first block of each stage; masks are drawn anew there, and the two parts of the gradient of a weight that the
    embedding and the head share are each added up by themselves first. ``experts``: how many ranks divide them, whose
    rows each part of the experts computes together."""

    divisor: int = 1
    first: Literal["rank", "micro", "average"] = "rank"
    by_module: bool = False
    by_block: bool = False
    fused: bool = False
    in_parts: bool = False
    columns: int = 1
    stages: tuple[int, ...] = (0,)
    experts: int = 1

    @property
    def by_collective(self) -> bool:
        """Whether a collective adds up more ranks than two, in an order of its own."""
        return self.divisor > 2

    @property
    def within_micro_batches(self) -> bool:
        """Whether a micro-batch itself is computed in another order than the natural one."""
        return self.by_module or self.by_block or self.fused or self.in_parts or self.columns > 1 or self.experts > 1


NATURAL = Order()


@contextlib.contextmanager
def summed_by_module(model: nn.Module, order: Order, blocks: Sequence[nn.Module] = ()) -> Iterator[None]:
    """Inside, with ``order.by_module``, every module of ``model`` reads its positional inputs through a node of its
    own, and gives its output through one; with ``order.by_block`` each of ``blocks`` reads all its inputs so.

    ZeRO-3 does the first (DeepSpeed 0.19.8, parameter_offload.py), and computes the gradients of linear layers by its
    own function (linear.py), which sums a bias's over all axes at once; FSDP2 does the second (torch 2.13.0,
    ``FSDPParamGroup._register_post_backward_hook``): autograd alone sums all parts of a hidden state's gradient one
    after another. What a decoder reads of its encoder has many.
    """

    def of(x: Any) -> Any:
        if isinstance(x, tuple | list) and type(x) in (tuple, list):
            return type(x)(map(of, x))
        # An alias: a view computes strides anew, and those of an axis of size 1 decide between layouts of convolutions.
        return torch.ops.aten.alias(x) if isinstance(x, torch.Tensor) and x.requires_grad else x

    def through_nodes(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        named = {name: of(x) for name, x in kwargs.items()} if order.by_block else kwargs
        return tuple(map(of, args)), named

    modules = list(model.modules()) if order.by_module else list(blocks) if order.by_block else []
    handles = [module.register_forward_pre_hook(through_nodes, with_kwargs=True) for module in modules]
    own = functional.linear
    if order.by_module:
        handles += [module.register_forward_hook(lambda module, args, output: of(output)) for module in modules]
        # A diagnosis may try out another one.
        functional.linear = _linear if isinstance(own, BuiltinFunctionType) else own
    try:
        yield
    finally:
        functional.linear = own
        for handle in handles:
            handle.remove()


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return _Linear.apply(input, weight, bias)


class _Linear(torch.autograd.Function):
    """A linear layer. ``x`` (..., in), ``weight`` (out, in), ``bias`` (out,) or None; returns (..., out). The order of
    multiplications in autograd's own backward depends on the strides of the weight; here it does not."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        # What functional.linear is outside; a copy, since its view may be changed in place (RoCBert).
        return torch.ops.aten.linear(x, weight, bias).clone()

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad, needed = outer[0], ctx.needs_input_grad
        of_weight = grad.reshape(-1, grad.shape[-1]).t().matmul(x.reshape(-1, x.shape[-1])) if needed[1] else None
        of_bias = grad.sum(list(range(grad.dim() - 1))) if needed[2] else None
        return grad.matmul(weight) if needed[0] else None, of_weight, of_bias


def fused_loss(
    model: Any, inputs: dict[str, torch.Tensor], targets: torch.Tensor, smoothing: float = 0.0, coefficient: float = 0.0
) -> tuple[Any, torch.Tensor]:
    """The model's output, and the cross-entropy summed over supervised tokens, whose hidden states alone meet the head.

    ``targets`` (batch, length): what each position predicts. ``smoothing``: of the labels; ``coefficient``: of the
    z-loss. The head has to be one linear layer whose product is what the model gives.
    """
    head = model.get_output_embeddings()
    kept = getattr(head, "modules_to_save", None)
    head = kept["default"] if kept is not None else head
    targets = targets.reshape(-1)
    rows = (targets != -100).nonzero().squeeze(1)

    def of_rows(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (args[0].reshape(-1, args[0].shape[-1]).index_select(0, rows), *args[1:])

    handle = head.register_forward_pre_hook(of_rows)
    try:
        output = model(**inputs)
    finally:
        handle.remove()
    loss: torch.Tensor = _Quotients.apply(output.logits.float(), targets.index_select(0, rows), smoothing, coefficient)
    return output, loss


class _Quotients(torch.autograd.Function):
    """Cross-entropy of logits (tokens, vocabulary) summed over all; the gradient's probabilities are exponentials
    divided by their sum, where torch's own are exponentials of logarithms."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, smoothing: float, coefficient: float
    ) -> torch.Tensor:
        at, highest = targets.unsqueeze(1), logits.amax(-1, keepdim=True)
        exponentials = (logits - highest).exp()
        sums = exponentials.sum(-1, keepdim=True)
        logsumexp = sums.log() + highest
        ctx.save_for_backward(exponentials / sums, at, logsumexp)
        ctx.terms = smoothing, coefficient
        if not smoothing and not coefficient:
            return (sums.log() + (highest - logits.gather(1, at))).sum()
        right = (1 - smoothing) * logits.gather(1, at) + smoothing * logits.mean(-1, keepdim=True)
        return (logsumexp - right + coefficient * logsumexp**2).sum()

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        probabilities, at, logsumexp = ctx.saved_tensors
        smoothing, coefficient = ctx.terms
        if coefficient:
            probabilities = probabilities * (1 + 2 * coefficient * logsumexp)
        gradient = probabilities.scatter_add(1, at, torch.full_like(logsumexp, smoothing - 1.0))
        if smoothing:
            gradient = gradient - smoothing / probabilities.shape[1]
        return gradient * outer[0], None, None, None
