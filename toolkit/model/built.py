"""What samples are checked against: a model's own config, and the sizes of its embeddings before it is divided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Built:
    """``config``: with the defaults of its class. ``ids``: rows of the embedding that reads tokens. ``written``:
    outputs of the head that writes them. None: the model has none."""

    config: dict[str, Any]
    ids: int | None
    written: int | None

    @classmethod
    def of(cls, model: nn.Module) -> Built:
        """Of a transformers model, with or without values."""
        config: Any = model.config
        return cls(config.to_dict(), _rows(model, "get_input_embeddings"), _rows(model, "get_output_embeddings"))


def _rows(model: Any, name: str) -> int | None:
    try:
        module = getattr(model, name)()
    except (NotImplementedError, AttributeError):
        return None
    weight = getattr(module, "weight", None)
    table = isinstance(module, nn.Embedding) or name == "get_output_embeddings"
    return int(weight.shape[0]) if table and weight is not None and weight.dim() == 2 else None
