"""Computes the loss from hidden states and head in chunks of tokens: the logits of all tokens never exist.

The head gets the labels separately and returns the loss instead of logits. It stays the same module and is called in
the same place, so code that gathers its weight around the call (ZeRO-3, FSDP) works unchanged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from toolkit.errors import InputError
from toolkit.model.loss_terms import CHUNK_BYTES, CROSS_ENTROPY, LossTerms
from toolkit.recipe.resolve import Resolved
from toolkit.tasks.labels import IGNORED


@dataclass
class _Wanted:
    labels: torch.Tensor
    terms: LossTerms
    answered: bool = False


_WANTED: ContextVar[_Wanted | None] = ContextVar("wanted", default=None)
_FACTOR: ContextVar[torch.Tensor | None] = ContextVar("factor", default=None)


@contextlib.contextmanager
def multiplied_by(factor: torch.Tensor) -> Iterator[None]:
    """Context for losses that are multiplied by ``factor``, a float32 scalar on their device, before the backward.

    A fused head computes the gradient with the loss. If it knows the factor it rounds to 16 bits what a loss from
    logits rounds: otherwise the head's input gradient is rounded once more, and multiplied by a rounded factor.
    """
    token = _FACTOR.set(factor)
    try:
        yield
    finally:
        _FACTOR.reset(token)


@contextlib.contextmanager
def wanted_loss(labels: torch.Tensor, terms: LossTerms = CROSS_ENTROPY) -> Iterator[_Wanted]:
    """Context in which a fused head returns the summed cross-entropy, with ``terms``, against ``labels`` (batch,
    length), as ``next_labels`` takes them; ``answered`` shows whether one did."""
    wanted = _Wanted(labels, terms)
    token = _WANTED.set(wanted)
    try:
        yield wanted
    finally:
        _WANTED.reset(token)


def answer_wanted() -> None:
    """What the model gives is the loss that is wanted, no logits; without effect where none is."""
    if (wanted := _WANTED.get()) is not None:
        wanted.answered = True


def next_labels(labels: torch.Tensor, length: int) -> torch.Tensor:
    """What each of ``length`` positions predicts: the label of the next token. The last predicts nothing, unless
    ``labels`` (batch, length or length + 1) continue behind it, where a row does."""
    following = labels[:, 1:]
    return functional.pad(following, (0, length - following.shape[1]), value=IGNORED)


def known_factor() -> torch.Tensor | None:
    """The factor of ``multiplied_by``; None outside."""
    return _FACTOR.get()


def fuse_head(model: nn.Module, resolved: Resolved) -> None:
    """Make the model's head return the loss when requested. Raises InputError if the head is not a plain linear layer
    (an adapter on it, a head of several layers)."""
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    kept = getattr(head, "modules_to_save", None)
    if kept is not None:
        head = kept["default"]  # PEFT's copy that trains, modules_to_save: [lm_head]
    if type(head) is not nn.Linear:
        what = "an adapter wraps it" if hasattr(head, "base_layer") else f"it is a {type(head).__name__}"
        if type(head).__name__ == "TrainableTokensWrapper":
            raise InputError(
                f"{resolved.source}: loss: fused requires a head that is one linear layer, but the adapter trains the "
                "rows of new tokens in it; set loss: plain, or adapter.modules_to_save with the embedding and the head"
            )
        raise InputError(
            f"{resolved.source}: loss: fused requires a head that is one linear layer, but {what}; remove it "
            "from adapter.target_modules (modules_to_save trains it fully), or set loss: plain"
        )
    linear: Any = head  # mypy lets no method be set
    linear.forward = HeadLoss(head, resolved.loss_kernel)


def fused_calls(model: nn.Module) -> int:
    """How often a fused head of ``model`` returned a loss."""
    return sum(m.forward.calls for m in model.modules() if isinstance(m.forward, HeadLoss))


class HeadLoss:
    """Replaces a head's forward; counts its losses as evidence."""

    def __init__(self, head: nn.Linear, kernel: str) -> None:
        self.head, self.kernel = head, kernel
        self.forward: Callable[..., torch.Tensor] = head.forward
        self.calls = 0

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        wanted = _WANTED.get()
        if wanted is None:
            return self.forward(hidden)
        wanted.answered = True
        self.calls += 1
        targets = next_labels(wanted.labels, hidden.shape[1]).reshape(-1)
        flat = hidden.reshape(-1, hidden.shape[-1])
        if self.kernel == "liger":
            return _liger(flat, self.head.weight, self.head.bias, targets, wanted.terms)
        return linear_cross_entropy(flat, self.head.weight, self.head.bias, targets, wanted.terms)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    terms: LossTerms = CROSS_ENTROPY,
) -> torch.Tensor:
    """Cross-entropy of ``hidden @ weight.T + bias`` against ``targets``, with ``terms``, summed over those that are not
    -100.

    ``hidden`` (tokens, width), ``weight`` (vocabulary, width), ``targets`` (tokens,) int64; a float32 scalar. Products
    run in the dtype that they would (autocast's, else the weight's), softmax and sums in float32.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    if kind == "cpu":  # tokens without loss cost nothing; on a GPU, to count them would wait for the device
        kept = (targets != IGNORED).nonzero().squeeze(1)
        if kept.numel() < targets.numel():
            hidden, targets = hidden.index_select(0, kept), targets.index_select(0, kept)
    return _ChunkedLoss.apply(hidden, weight, bias, targets, known_factor(), dtype, torch.is_grad_enabled(), terms)


class _ChunkedLoss(torch.autograd.Function):
    """The gradient is computed with the loss, while a chunk's logits are there: nothing is computed twice, and the
    backward multiplies by one number (Hsu et al., Liger Kernel, arXiv:2410.10989, section 3.2): by 1 where ``factor``
    was known before."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        factor: torch.Tensor | None,
        dtype: torch.dtype,
        differentiable: bool,
        terms: LossTerms,
    ) -> torch.Tensor:
        needs = [differentiable and need for need in ctx.needs_input_grad[:3]]
        head = weight.to(dtype)
        added = None if bias is None else bias.to(dtype)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        of_hidden = torch.empty_like(hidden) if needs[0] else None
        # Chunks are summed in float32, whatever the weight is kept in.
        of_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if needs[1] else None
        of_bias = torch.zeros(weight.shape[:1], dtype=torch.float32, device=weight.device) if needs[2] else None
        rows = max(1, CHUNK_BYTES.get(hidden.device.type, CHUNK_BYTES["cuda"]) // (4 * weight.shape[0]))
        for start in range(0, hidden.shape[0], rows):
            chunk = hidden[start : start + rows].to(dtype)
            supervised = targets[start : start + rows] != IGNORED
            right = targets[start : start + rows].clamp(min=0).unsqueeze(1)
            logits = functional.linear(chunk, head, added).float()
            picked = logits.gather(1, right)
            highest = logits.amax(-1, keepdim=True)
            # In place from here on. Probabilities as quotients err by roundings alone; as exp(logit - logsumexp) they
            # would err by roundings of numbers the size of the loss. With smoothing e the loss is logsumexp
            # - (1 - e) label's logit - e mean logit; its gradient: softmax - (1 - e) at the label - e / classes.
            logits.sub_(highest)
            spread = logits.mean(-1, keepdim=True) if terms.smoothing else None
            exponentials = logits.exp_()
            sums = exponentials.sum(-1, keepdim=True)
            logarithms = sums.log()
            if spread is None:
                losses = logarithms + (highest - picked)
            else:
                losses = logarithms + (1 - terms.smoothing) * (highest - picked) - terms.smoothing * spread
            denominators = logarithms + highest  # logsumexp
            if terms.z_loss:
                losses = losses + terms.z_loss * denominators.square()
            losses = losses.squeeze(1)
            total += losses.masked_fill(~supervised, 0.0).sum()
            if not any(needs):
                continue
            gradient = exponentials.div_(sums)
            if terms.z_loss:
                gradient.mul_(1 + 2 * terms.z_loss * denominators)
            gradient.scatter_add_(1, right, torch.full_like(sums, terms.smoothing - 1.0))
            if terms.smoothing:
                gradient.sub_(terms.smoothing / weight.shape[0])
            gradient.masked_fill_(~supervised.unsqueeze(1), 0.0)
            if factor is not None:
                gradient.mul_(factor)
            low = gradient.to(dtype)
            if of_bias is not None:
                of_bias += low.sum(0)
            if of_hidden is not None:
                of_hidden[start : start + rows] = low @ head
            if of_weight is not None:
                of_weight += low.t() @ chunk
        ctx.save_for_backward(of_hidden, of_weight, of_bias)
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        ctx.factor = factor
        return total

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_hidden, of_weight, of_bias = ctx.saved_tensors
        [left] = outer if ctx.factor is None else [outer[0] / ctx.factor]
        if of_hidden is not None and ctx.factor is not None:
            of_hidden = of_hidden * left.to(of_hidden.dtype)  # 1, in any dtype
        elif of_hidden is not None:
            of_hidden = (of_hidden.float() * left).to(of_hidden.dtype)
        return (
            of_hidden,
            None if of_weight is None else (of_weight * left).to(ctx.dtypes[0]),
            None if of_bias is None else (of_bias * left).to(ctx.dtypes[1]),
            *[None] * 5,
        )


def _liger(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, terms: LossTerms
) -> torch.Tensor:
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(
        ignore_index=IGNORED, reduction="sum", label_smoothing=terms.smoothing, lse_square_scale=terms.z_loss
    )
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    return loss(weight, hidden, targets, bias).float()
