"""What a recorded model answers, where a library gave it a forward of its own: the same, from the definition.

TRL's trainers (1.16.0, ``add_fused_lm_head``) have a causal language model answer with the log-probabilities of its
labels, computed in tiles and without logits. The plain side computes them from the logits of the model's own forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

IGNORED = -100


def answer(module: nn.Module, args: list[Any], kwargs: dict[str, Any], draw: torch.Generator | None = None) -> Any:
    """Call ``module`` as it was called. ``draw``: with the normaliser of each row one rounding off in the gradient, up
    or down at random, as that of another right implementation may be."""
    if not kwargs.get("fused_lm_head"):
        return module(*args, **kwargs)
    given = dict(kwargs)
    del given["fused_lm_head"]
    labels, shifted = given.pop("labels", None), given.pop("shift_labels", None)
    items = given.pop("num_items_in_batch", None)
    logits = module(*args, **given).logits
    rows = logits if shifted is not None else logits[:, :-1]
    labels = shifted if shifted is not None else labels[:, 1:]
    mask = labels != IGNORED
    rows = rows.float()
    # Not log_softmax, which on a CPU adds up the exponentials of a row one after another (torch 2.13.0): where a model
    # is sure of the label, what is left of its gradient is 1e-4 off with 49 thousand classes; as TRL does it, less.
    total = torch.logsumexp(rows, -1)
    if draw is not None:
        signs = torch.randint(0, 2, total.shape, generator=draw).mul_(2).sub_(1).to(total.device)
        off = signs * torch.finfo(total.dtype).eps * total.detach().abs()
        total = total + (total - total.detach()) * off  # probabilities are exp(logit - total)
    chosen = rows.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1) - total
    log_probs = chosen.masked_fill(~mask, 0.0)
    loss = -log_probs.sum() / (mask.sum().clamp(min=1) if items is None else items)
    return {"loss": loss, "log_probs": log_probs, "logits": logits}
