"""The plain loop that every strategy is held against: one process, torch and the model, nothing else.

Read it top to bottom; there is no more to it. It imports the recipe, the loading of models and the order of
samples, and nothing of the strategies, of accelerate or of DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.nn import functional

from toolkit.data.collate import MicroBatch
from toolkit.recipe.resolve import Resolved

Seed = Callable[[int, int, int], None]
"""``seed(step, micro, rank)``: sets torch's generator before a micro-batch, so that dropout masks agree."""


class PlainLoop:
    """A model, its gradients and AdamW, one micro-batch after another.

    After ``backward``: ``model``'s ``.grad`` is the gradient of the window's loss, the mean over its supervised
    tokens. After ``update``: ``norm`` is its 2-norm, ``coefficient`` what clipping multiplied it by.
    """

    def __init__(self, model: nn.Module, resolved: Resolved, decayed: frozenset[str], seed: Seed) -> None:
        self.model = model
        self.resolved = resolved
        self.seed = seed
        self.named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        settings = resolved.recipe.optimizer
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p], "weight_decay": settings.weight_decay if name in decayed else 0.0}
                for name, p in self.named.items()
            ],
            lr=settings.lr,
            betas=(settings.betas[0], settings.betas[1]),
            eps=settings.eps,
            foreach=False,
        )

    def backward(self, step: int, ranks: Sequence[Sequence[MicroBatch]]) -> float:
        """Accumulate the gradient of one window, given as micro-batches by rank; returns its mean loss."""
        tokens = sum(micro.supervised for window in ranks for micro in window)
        total = 0.0
        for rank, window in enumerate(ranks):
            for micro in window:
                self.seed(step, micro.micro, rank)
                with self._autocast():
                    loss = self.loss_sum(micro)
                (loss / max(1, tokens)).backward()
                total += loss.item()
        return total / max(1, tokens)

    def update(self, lr: float) -> None:
        """Clip, step, forget the gradients."""
        grads = [p.grad for p in self.named.values() if p.grad is not None]
        self.norm = torch.stack([g.float().pow(2).sum() for g in grads]).sum().sqrt()
        self.coefficient = 1.0
        limit = self.resolved.max_grad_norm
        if limit > 0:
            # torch.nn.utils.clip_grad_norm_ adds the same 1e-6
            self.coefficient = min(1.0, limit / (self.norm.item() + 1e-6))
            for grad in grads:
                grad.mul_(self.coefficient)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()

    def loss_sum(self, micro: MicroBatch) -> torch.Tensor:
        """Cross-entropy summed over a micro-batch's supervised tokens, in float32."""
        task = self.resolved.recipe.model.task
        inputs = {name: tensor for name, tensor in micro.tensors.items() if name != "labels"}
        labels = micro.tensors["labels"]
        if task == "seq2seq-lm":
            config = self.model.config
            start = config.decoder_start_token_id
            first = torch.full_like(labels[:, :1], config.pad_token_id if start is None else start)
            shifted = torch.cat([first, labels[:, :-1]], dim=1)
            inputs["decoder_input_ids"] = shifted.masked_fill(shifted == -100, config.pad_token_id or 0)
        output = self.model(**inputs)
        logits = output.logits.float()
        if task == "causal-lm":
            logits, labels = logits[:, :-1], labels[:, 1:]
        loss = functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum")
        if getattr(output, "aux_loss", None) is not None and not isinstance(output.aux_loss, int):
            loss = loss + self.model.config.router_aux_loss_coef * output.aux_loss * (labels != -100).sum()
        return loss

    def _autocast(self) -> torch.autocast:
        precision = self.resolved.precision
        device = next(self.model.parameters()).device.type
        return torch.autocast(device, dtype=getattr(torch, precision.compute), enabled=precision.mixed)


def train_plainly(
    loop: PlainLoop,
    steps: Iterable[Sequence[Sequence[MicroBatch]]],
    learning_rate: Callable[[int], float],
) -> list[float]:
    """Run ``loop`` over windows of micro-batches by rank; returns the loss of each step."""
    loop.model.train()
    losses = []
    for step, ranks in enumerate(steps):
        losses.append(loop.backward(step, ranks))
        loop.update(learning_rate(step))
    return losses
