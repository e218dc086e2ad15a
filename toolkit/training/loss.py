"""The loss as a sum over supervised tokens; the caller divides it per window."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from toolkit.data.collate import Bounds
from toolkit.model.bounds import bounds_arguments
from toolkit.model.context import part_of_rows
from toolkit.model.head_loss import next_labels, wanted_loss
from toolkit.model.loss_terms import CROSS_ENTROPY, LossTerms
from toolkit.recipe.mesh import RowPart
from toolkit.tasks import task_of
from toolkit.tasks.labels import IGNORED, Labels


def loss_sum(
    model: nn.Module,
    config: Any,
    tensors: Mapping[str, torch.Tensor],
    task: str,
    terms: LossTerms = CROSS_ENTROPY,
    part: RowPart | None = None,
    bounds: Bounds | None = None,
    *,
    balance: bool = True,
    observe: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """Cross-entropy, with ``terms``, summed over the supervised tokens of one micro-batch: a float32 scalar; of a task
    whose labels are numbers, the squared errors, summed over its samples. ``part``: of the rows that this rank
    computes, its predictions alone. ``balance``: with the balance loss of experts, if the model's config has one.
    ``bounds``: of packed samples, for an attention that takes them. ``observe``: called with the logits, float32
    (predictions, classes), and the labels (predictions,) that they are of.

    ``tensors``: ``input_ids`` and ``attention_mask`` (batch, length) int64, ``labels`` (batch, length) int64
    with -100 where not supervised, (batch,) for classification and regression. Logits are taken to float32 first, as
    transformers does; those of an adapter's virtual tokens are left out. ``config`` is the transformers config of the
    model inside ``model``.
    """
    inputs = {name: tensor for name, tensor in tensors.items() if name != "labels"}
    labels = tensors["labels"]
    layout = task_of(task).labels
    if layout is Labels.TARGET:
        inputs["decoder_input_ids"] = _decoder_inputs(config, labels)
    with part_of_rows(inputs, labels, part) as (inputs, labels), wanted_loss(labels, terms) as wanted:
        output = model(**inputs, **bounds_arguments(config, inputs, bounds))
    logits = output.logits
    routed = getattr(output, "aux_loss", None) if balance else None
    if task_of(task).numbers:
        if observe is not None:
            observe(logits, labels)
        return squared_errors(logits, labels) + _router_loss(config, routed, labels)
    if wanted.answered:  # the head has given the loss itself
        return logits + _router_loss(config, routed, labels[:, 1:])
    if layout is Labels.NEXT and logits.shape[1] > labels.shape[1]:
        # Virtual tokens (prompt tuning) precede the sample. Nothing is learned at them: the first token
        # stays unsupervised, as without them.
        logits = logits[:, -labels.shape[1] :]
    if layout is Labels.NEXT:
        # Labels move, logits stay: to leave out their last position would copy them, and once more in the backward.
        labels = next_labels(labels, logits.shape[1])
    flat, targets = logits.reshape(-1, logits.shape[-1]).float(), labels.reshape(-1)
    if observe is not None:
        observe(flat, targets)
    loss = functional.cross_entropy(
        flat, targets, ignore_index=IGNORED, reduction="sum", label_smoothing=terms.smoothing
    )
    if terms.z_loss:
        loss = loss + terms.z_loss * squared_logsumexp(flat, targets)
    for term in terms.others:
        loss = loss + term(flat, targets)
    return loss + _router_loss(config, routed, labels)


def squared_logsumexp(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The squared logsumexp of ``logits`` (tokens, classes), summed over the tokens that have a target."""
    return logits.logsumexp(-1).square().masked_fill(targets == IGNORED, 0.0).sum()


def squared_errors(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The squared differences of ``logits`` (samples, 1) and the numbers whose bits are ``labels`` (samples,), summed
    over the samples that have one: a float32 scalar."""
    numbers = labels.to(torch.int32).view(torch.float32)
    differences = logits.squeeze(-1).float() - numbers
    return differences.masked_fill(labels == IGNORED, 0.0).square().sum()


def first_token(config: Any) -> int:
    """The id that a decoder starts from."""
    start = getattr(config, "decoder_start_token_id", None)
    return int(config.pad_token_id if start is None else start)


def _decoder_inputs(config: Any, labels: torch.Tensor) -> torch.Tensor:
    """Labels shifted right behind the decoder's start token, -100 replaced by padding."""
    shifted = labels.new_empty(labels.shape)
    shifted[:, 1:] = labels[:, :-1]
    shifted[:, 0] = first_token(config)
    return shifted.masked_fill(shifted == -100, config.pad_token_id or 0)


def _router_loss(config: Any, mean: torch.Tensor | None, labels: torch.Tensor) -> torch.Tensor | float:
    """A mixture-of-experts balance loss, where the model's config asks for one (``output_router_logits``).

    It is a mean over a micro-batch; weighted by the micro-batch's supervised tokens it adds up over a window.
    """
    if not isinstance(mean, torch.Tensor):
        return 0.0
    return config.router_aux_loss_coef * mean * (labels != -100).sum()
