"""Evidence that Liger's kernels run: what was replaced, counted in the model that trains."""

from __future__ import annotations

from torch import nn

from toolkit.options.liger.apply import Replaced, replaced
from toolkit.strategies.engines.claims import Claim


def kernel_claim(model: nn.Module, right: Replaced) -> Claim:
    """What was replaced before adapters is in the model that trains; copies that PEFT trains in place of a norm may be
    there besides."""
    seen = replaced(model)
    ok = seen.norms >= right.norms and seen.mlps >= right.mlps and seen.rotations == right.rotations
    return Claim("liger-kernels", "operators of liger_kernel", str(right), str(seen), ok and right != Replaced())
