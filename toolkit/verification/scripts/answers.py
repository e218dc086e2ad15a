"""What a recorded model answers, where a library gave it a forward of its own: the same, from the definition.

TRL's trainers (1.16.0, ``add_fused_lm_head``) have a causal language model answer with the log-probabilities of its
labels, computed in tiles and without logits. The plain side computes them from the logits of the model's own forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

IGNORED = -100


def answer(module: nn.Module, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Call ``module`` as it was called."""
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
    chosen = torch.log_softmax(rows.float(), -1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    log_probs = chosen.masked_fill(~mask, 0.0)
    loss = -log_probs.sum() / (mask.sum().clamp(min=1) if items is None else items)
    return {"loss": loss, "log_probs": log_probs, "logits": logits}
