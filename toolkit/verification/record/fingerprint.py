"""Whether tensors of different ranks are equal, without sending them."""

from __future__ import annotations

import torch


def fingerprint(tensor: torch.Tensor) -> str:
    """Sums of a tensor's bits: equal for equal tensors, and cheaper than a digest by far."""
    if not tensor.numel():
        return "empty"
    flat = tensor.detach().contiguous().reshape(-1)
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    bits = flat.view(width)
    sums = bits.sum(dtype=torch.int64), bits[::7].sum(dtype=torch.int64)
    return f"{tensor.dtype} {tuple(tensor.shape)} {int(sums[0])} {int(sums[1])}"
