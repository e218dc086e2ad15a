"""AdamW whose moments are kept in 8 bits, in blocks of 256 (Dettmers et al., arXiv:2110.02861, section 2).

bitsandbytes' and torchao's own take the same steps. Neither serves here: the first knows no DTensor, the second
compiles each step and keeps odd sizes in 32 bits silently. In both, -1 is missing from the table of the signed
moment, so that unpacking and packing again changes it: a checkpoint of whole tensors would not resume to the bit.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from toolkit.optim.each import EachParameter
from toolkit.recipe.schema import Optimizer

BLOCK = 256
_CHUNK = 2**22
"""Elements that are unpacked at once."""
SIGNED = {"exp_avg": True, "exp_avg_sq": False}


@functools.cache
def table(signed: bool) -> tuple[float, ...]:
    """The 256 values that a code stands for, as parts of the largest in its block, in order (the paper's dynamic tree
    quantisation): seven powers of ten, each with twice as many values as the next smaller, 0, and 1; the smallest of
    the signed ones is -1."""
    values = [0.0, 1.0]
    for power in range(7):
        steps = 2 ** (power + (not signed))
        middles = [(0.1 + 0.9 * (i + 0.5) / steps) * 10.0 ** (power - 6) for i in range(steps)]
        values += middles + ([-m for m in middles] if signed else [])
    values.sort()
    if signed:
        values[0] = -1.0
    return tuple(values)


@functools.cache
def _tensors(signed: bool, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The table, and the bounds between its values. What is not zero never becomes a second moment of zero, which the
    step divides by."""
    values = torch.tensor(table(signed), dtype=torch.float64)
    bounds = (values[:-1] + values[1:]) / 2
    if not signed:
        bounds[0] = 0.0
    return values.float().to(device), bounds.float().to(device)


def build(groups: list[dict[str, Any]], optimizer: Optimizer, *, fused: bool) -> torch.optim.Optimizer:
    """8-bit AdamW over parameter groups; it has its own kernels."""
    betas = (optimizer.betas[0], optimizer.betas[1])
    return AdamW8bit(groups, lr=optimizer.lr, betas=betas, eps=optimizer.eps)


class Moment8:
    """One moment of one parameter's part on this rank: a code for each element, a scale for each block."""

    def __init__(self, part: torch.Tensor, key: str) -> None:
        self.signed = SIGNED[key]
        self.shape = part.shape
        size = part.numel()
        self.codes = torch.empty(size, dtype=torch.uint8, device=part.device)
        self.scales = torch.zeros(-(-size // BLOCK), dtype=torch.float32, device=part.device)
        self.codes.fill_(table(self.signed).index(0.0))

    def unpack(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements from ``start`` (which begins a block) to ``stop``, flat, in float32."""
        values, _ = _tensors(self.signed, self.codes.device)
        unpacked = values[self.codes[start:stop].int()]
        size, first = unpacked.numel(), start // BLOCK
        blocks = size // BLOCK
        unpacked[: blocks * BLOCK].view(-1, BLOCK).mul_(self.scales[first : first + blocks].unsqueeze(1))
        if size % BLOCK:
            unpacked[blocks * BLOCK :].mul_(self.scales[first + blocks])
        return unpacked

    def spread(self) -> torch.Tensor:
        """The scale of each element."""
        return self.scales.repeat_interleave(BLOCK)[: self.codes.numel()]

    def pack(self, values: torch.Tensor, start: int = 0) -> None:
        """Keep ``values``, flat, from element ``start`` on, which begins a block."""
        size, first = values.numel(), start // BLOCK
        blocks = nn.functional.pad(values, (0, -size % BLOCK)).view(-1, BLOCK)
        scales = blocks.abs().amax(dim=1)
        _, bounds = _tensors(self.signed, values.device)
        parts = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
        codes = torch.bucketize(parts, bounds, out_int32=True).view(-1)[:size]
        self.codes[start : start + size] = codes.to(torch.uint8)
        self.scales[first : first + len(scales)] = scales


class AdamW8bit(EachParameter, torch.optim.Optimizer):  # type: ignore[misc]
    """The step is taken with the moments in float32, which are packed after it. ``state[p]``: ``step``, ``exp_avg`` and
    ``exp_avg_sq``, Moment8 each; a tensor that is put in their place is packed by the next step."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        for group in self.param_groups:
            for parameter in group["params"]:
                for signed in SIGNED.values():
                    _tensors(signed, local(parameter).device)  # copied to the device here and not in the first step

    def _step(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        weight, gradient = local(parameter).view(-1), local(parameter.grad).reshape(-1)
        state = self.state[parameter]
        self._prepare(state, local(parameter))
        state["step"] += 1
        count, (beta1, beta2), lr = int(state["step"].item()), group["betas"], group["lr"]
        root = (1 - beta2**count) ** 0.5
        for start in range(0, weight.numel(), _CHUNK):
            part = slice(start, min(start + _CHUNK, weight.numel()))
            g = gradient[part].float()
            m, v = (state[key].unpack(part.start, part.stop) for key in SIGNED)
            m.lerp_(g, 1 - beta1)
            v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            del g
            w = weight[part].float().mul_(1 - lr * group["weight_decay"])  # the weight itself where it is float32
            w.addcdiv_(m, (v.sqrt() / root).add_(group["eps"]), value=-lr / (1 - beta1**count))
            if w.data_ptr() != weight[part].data_ptr():
                weight[part].copy_(w)
            state["exp_avg"].pack(m, start)
            state["exp_avg_sq"].pack(v, start)

    def _prepare(self, state: dict[str, Any], part: torch.Tensor) -> None:
        if not state:
            state["step"] = torch.zeros(())
        state["step"] = state["step"].cpu()  # read at every step
        for key in SIGNED:
            if isinstance(given := state.get(key), Moment8):
                continue
            state[key] = Moment8(part, key)
            if given is not None:
                state[key].pack(local(given).reshape(-1).float())


def local(tensor: Any) -> torch.Tensor:
    """This rank's part, in the memory that it is in."""
    with torch.no_grad():
        part: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part


def dense_moment(value: Any, parameter: torch.Tensor, scales: bool = False, values: bool = True) -> torch.Tensor:
    """A moment as a tensor spread as its parameter is; ``scales``: of a packed one, the scale of each element. Without
    ``values`` a packed one is not unpacked: shape and dtype alone, on the meta device."""
    if not isinstance(value, Moment8):
        tensor: torch.Tensor = value
        return tensor
    if not values:
        return torch.empty(value.shape, dtype=torch.float32, device="meta")
    flat = value.spread() if scales else value.unpack()
    part = flat.view(value.shape)
    if not isinstance(parameter, DTensor):
        return part
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def stored_dtype(value: Any) -> torch.dtype:
    """What a moment is kept in: uint8 only where it has a scale for each block."""
    if isinstance(value, Moment8):
        blocks = -(-value.codes.numel() // BLOCK)
        return value.codes.dtype if value.scales.numel() == blocks else torch.float32
    dtype: torch.dtype = value.dtype
    return dtype


def moment_dtype(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> torch.dtype:
    """The dtype that a moment is given to an optimizer in."""
    return torch.float32 if isinstance(optimizer, AdamW8bit) else parameter.dtype
