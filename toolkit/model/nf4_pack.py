"""A weight packed in NF4 with double quantisation, by bitsandbytes."""

from __future__ import annotations

from typing import Any

import torch

BLOCK, NESTED = 64, 256
"""Weights that share a statistic; statistics that share one themselves (section 3 of the paper)."""


def packed_nf4(weight: torch.Tensor, storage: torch.dtype, nested: bool = True) -> tuple[torch.Tensor, Any]:
    """A weight in 4 bits and the statistics that unpack it, of blocks of 64, if ``nested`` themselves in 8 bits by 256.

    As one row: on a CPU with AVX-512, bitsandbytes 0.50.2 unpacks rows that are no multiple of 64 long with the sizes
    of other blocks (40 % off where 9 % is right; rows of 32). With two axes: for a shape (n,) it gives (1, n), and its
    stand-in for compilers (n,), so that compiled blocks would end with «wrong number of dimensions»."""
    from bitsandbytes.functional import create_dynamic_map, name2qmap, quantize_4bit

    if "dynamic" not in name2qmap:
        # Kept for the process on the device of its first use: after a plan, on the meta device (bitsandbytes 0.50.2).
        with torch.device("cpu"):
            name2qmap["dynamic"] = create_dynamic_map()
    row = weight.reshape(1, -1)
    return quantize_4bit(row, blocksize=BLOCK, compress_statistics=nested, quant_type="nf4", quant_storage=storage)
