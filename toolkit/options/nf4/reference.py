"""A base in NF4 in the plain loop: plain layers, with the values that 4 bits hold."""

from __future__ import annotations

from typing import Any

import torch

from toolkit.options.nf4.apply import base_linears
from toolkit.options.nf4.files import packed_weight
from toolkit.options.nf4.pack import BLOCK, NESTED, packed_nf4
from toolkit.reference.option import PlainOption

NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
       -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
       0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)  # fmt: skip
"""NormalFloat4, arXiv:2305.14314, appendix E."""


class PlainBase(PlainOption):
    """Gives the base's linear layers the values that their weights have in 4 bits; the layers stay plain."""

    def change(self, model: Any, resolved: Any) -> None:
        for linear in base_linears(model, resolved).values():
            packed, statistics = packed_weight(linear) or packed_nf4(linear.weight.detach(), torch.uint8)
            linear.weight.data = nf4_values(packed, statistics, linear.weight)


def plain(settings: Any) -> PlainBase:
    return PlainBase()


def nf4_values(packed: torch.Tensor, statistics: Any, like: torch.Tensor) -> torch.Tensor:
    """The values of 4-bit weights, from the definition: code times the largest size in its block of 64; with double
    quantisation those sizes, less their mean, are 8-bit codes of a table times the largest in their block of 256
    (section 3). In float32, then in the dtype of ``like``."""
    pairs = packed.view(torch.uint8).flatten().long()
    codes = torch.stack([pairs >> 4, pairs & 15], dim=1).flatten()[: like.numel()]
    sizes = statistics.absmax
    if statistics.state2 is not None:
        codes_of_sizes = statistics.state2.code[sizes.long()]
        sizes = codes_of_sizes * statistics.state2.absmax.repeat_interleave(NESTED)[: sizes.numel()] + statistics.offset
    values = torch.tensor(NF4)[codes] * sizes.repeat_interleave(BLOCK)[: codes.numel()]
    return values.view(like.shape).to(like.dtype)
