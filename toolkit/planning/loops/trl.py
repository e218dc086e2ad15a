"""TRL's SFTTrainer: log-probabilities of tiles of the logits, without the logits.

Read from trl 1.16.0: trainer/sft_trainer.py (``compute_loss``, the casts of a quantised model's adapters),
trainer/utils.py (``add_fused_lm_head``) and kernels/chunked_logprob.py (``ChunkedLogProbFunction``). It does not call
PEFT's ``prepare_model_for_kbit_training`` any more, so that nothing frozen is in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from toolkit.model.loss_terms import LossTerms
from toolkit.planning.target import acted_device

TOKENS, WORDS = 4096, 32768
"""Rows and columns of a tile: ``TOKEN_CHUNK_SIZE`` and ``_CHUNKED_LOGPROB_CHUNK_SIZE``."""


class TiledLogProbs(torch.autograd.Function):
    """``hidden`` (tokens, width) and the head's ``weight`` (words, width) to log-probabilities and entropies (tokens,),
    float32. One buffer of a tile is used for all; the backward computes them again, and adds gradients up in float32,
    that of the head's weight whole."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        ctx.set_materialize_grads(False)
        half = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else hidden.dtype
        rows = hidden.shape[0]
        sums = [torch.zeros(rows, dtype=torch.float32) for _ in range(7)]
        buffer = _buffer(rows, half)
        for tokens, words in _tiles(rows, weight.shape[0]):
            tile = _product(hidden, weight, bias, tokens, words, buffer)
            if acted_device() == "cpu":
                scaled = tile.float() * 1.0 * 1.0
                before_target = scaled < sums[5][tokens, None]  # ``_forward_tile`` has its mask to the tile's end
                shifted = torch.exp(scaled - sums[0][tokens, None])
                sums[1][tokens] += (shifted * scaled).sum(-1)
                del before_target
        log_probs, entropy, is_top1 = sums[5] - sums[0], sums[0] - sums[1], sums[5] >= sums[0]
        ctx.save_for_backward(hidden, weight, bias, sums[0] + 1.0, entropy)
        ctx.half = half
        ctx.mark_non_differentiable(is_top1)
        return log_probs, entropy, is_top1

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        hidden, weight, bias, log_z, _ = ctx.saved_tensors
        of_hidden, of_weight, of_bias = (
            torch.zeros(given.shape, dtype=torch.float32) if wanted and given is not None else None
            for given, wanted in zip((hidden, weight, bias), ctx.needs_input_grad, strict=True)
        )
        buffer = _buffer(hidden.shape[0], ctx.half)
        for tokens, words in _tiles(hidden.shape[0], weight.shape[0]):
            rows, columns = hidden[tokens].to(ctx.half), weight[words].to(ctx.half)
            tile = _product(hidden, weight, bias, tokens, words, buffer)
            if acted_device() == "cpu":
                _gradient_on_cpu(tile, grads[0][tokens, None], log_z[tokens, None])
            if of_hidden is not None:
                _add(of_hidden[tokens], tile, columns)
            if of_weight is not None:
                _add(of_weight[words], tile.t(), rows)
        return (
            None if of_hidden is None else of_hidden.to(hidden.dtype),
            None if of_weight is None else of_weight.to(weight.dtype),
            None if of_bias is None else of_bias.to(bias.dtype),
        )


def _tiles(rows: int, words: int) -> Iterator[tuple[slice, slice]]:
    for top in range(0, rows, TOKENS):
        for left in range(0, words, WORDS):
            yield slice(top, min(top + TOKENS, rows)), slice(left, min(left + WORDS, words))


def _buffer(rows: int, half: torch.dtype) -> torch.Tensor:
    return torch.empty(min(rows, TOKENS), WORDS, dtype=half)


def _product(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tokens: slice,
    words: slice,
    buffer: torch.Tensor,
) -> torch.Tensor:
    rows, columns = hidden[tokens].to(buffer.dtype), weight[words].to(buffer.dtype)
    tile = buffer[: rows.shape[0], : columns.shape[0]]
    torch.mm(rows, columns.t(), out=tile)
    if bias is not None:
        tile.add_(bias[words].to(buffer.dtype))
    return tile


def _gradient_on_cpu(tile: torch.Tensor, given: torch.Tensor, log_z: torch.Tensor) -> None:
    """``_backward_tile``, for devices without Triton: five float32 copies of a tile at once, where the GPU's kernel
    writes over it."""
    logits = tile.float() * 1.0
    scaled = logits * 1.0
    log_shares = scaled - log_z
    shares = torch.exp(log_shares)
    grad = torch.zeros_like(scaled)
    target = scaled == log_z
    grad += given * (target.float() - shares)
    grad = grad * 1.0
    tile.copy_(grad * 1.0)


def _add(total: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> None:
    """On a GPU the product of 16-bit tensors is added up in float32; elsewhere they are copied to it first."""
    if acted_device() == "cpu":
        total.addmm_(one.float(), other.float())


def tiled_loss(
    model: nn.Module, config: Any, tensors: Mapping[str, torch.Tensor], task: str, terms: LossTerms
) -> torch.Tensor:
    base: Any = getattr(model, "get_base_model", lambda: model)()
    head = base.get_output_embeddings()

    def forward(*args: Any, labels: torch.Tensor | None = None, **options: Any) -> tuple[torch.Tensor, ...]:
        found = base.base_model(*args, **options | {"use_cache": False})
        hidden = found.last_hidden_state[:, :-1]
        shape = hidden.shape[:-1]
        if acted_device() == "cuda":  # the supervised positions alone, here all of them
            rows = hidden.reshape(-1, hidden.shape[-1])
            kept = torch.zeros(rows.shape[0], dtype=torch.int64)
            flat = torch.index_select(rows, 0, kept)
            del rows, kept
        else:
            flat = hidden.reshape(-1, hidden.shape[-1])
        del hidden
        log_probs, entropy, is_top1 = TiledLogProbs.apply(flat, head.weight, head.bias)
        return log_probs.view(shape) * 1.0, entropy.view(shape) * 1.0, is_top1.view(shape)

    base.forward = forward
    try:
        log_probs, _, _ = model(**tensors)
        loss: torch.Tensor = (-log_probs).sum()
        return loss
    finally:
        del base.__dict__["forward"]
