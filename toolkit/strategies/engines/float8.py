"""Evidence that products run in float8: the layers that do, counted in the model that trains."""

from __future__ import annotations

from torch import nn

from toolkit.model.fp8 import fp8_layers
from toolkit.strategies.engines.claims import Claim

FLOAT8_LAYERS = "float8-layers"


def product_claim(model: nn.Module, converted: int) -> Claim:
    """The layers that were converted are those of the model that trains."""
    seen = len(fp8_layers(model))
    return Claim(FLOAT8_LAYERS, "linear layers in float8", str(converted), str(seen), seen == converted > 0)
