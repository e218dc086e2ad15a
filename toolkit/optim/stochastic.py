"""AdamW over bfloat16 weights with stochastic rounding: an update smaller than half the distance to the next bfloat16
number moves the weight with a probability in proportion to it, where rounding to nearest loses it.

torchao's AdamW rounds so too, with bits that differ from rank to rank and run to run. Here they follow from the name of
the weight, the step and the element's place in the whole weight: every strategy and number of processes takes the same
step, a resumed run continues to the bit, and `verify` knows the result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from toolkit.optim.adamw8bit import local
from toolkit.optim.placed import Place, PlacedOptimizer
from toolkit.optimizers.base import ADAM
from toolkit.recipe.schema import Optimizer

_CPU_CHUNK = 2**15
"""Elements at once without the compiler on a CPU, whose cache then holds the intermediate values ..."""
_GPU_CHUNK = 2**20
"""... and on a GPU, where each takes memory."""


def build(groups: list[dict[str, Any]], optimizer: Optimizer) -> StochasticAdamW:
    """Stochastically rounded AdamW over parameter groups."""
    betas = (optimizer.betas[0], optimizer.betas[1])
    return StochasticAdamW(groups, optimizer.lr, betas, optimizer.eps)


class StochasticAdamW(PlacedOptimizer):
    """``state[p]``: ``step`` on the host, ``exp_avg`` and ``exp_avg_sq`` in bfloat16, rounded stochastically as well:
    to nearest, a second moment whose decay is below half a digit never decreases.

    The step is one kernel, by torch.compile; without a compiler it is torch's operators, chunk by chunk, with the same
    result.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.fell_back: str | None = None
        """That the step runs uncompiled, and why, if it does."""
        self.calls = {"compiled": 0, "uncompiled": 0}
        """Calls of either form of the kernel."""
        self._places: dict[torch.Tensor, Sequence[Place]] = {}

    def locate(self, tensor: torch.Tensor, places: Sequence[Place]) -> None:
        """Raises AssertionError for a tensor that is not bfloat16."""
        if tensor.dtype != torch.bfloat16:
            raise AssertionError(f"stochastic rounding of a tensor of {tensor.dtype}")
        self._places[tensor] = places

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient. Raises AssertionError for a tensor without places."""
        assert closure is None
        work = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    work += self._prepare(parameter, group)
        if not work:
            return
        device = work[0].weight.device
        # Two copies to the device a step, whatever the number of weights.
        numbers = _on(device, torch.tensor([one.numbers for one in work], dtype=torch.float32))
        keys = _on(device, torch.tensor([one.key for one in work], dtype=torch.int32))
        for at, one in enumerate(work):
            self._update(one, keys[at], numbers[at])

    def _prepare(self, parameter: torch.Tensor, group: dict[str, Any]) -> list[_Work]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            for key in ADAM:
                state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["step"] = state["step"].cpu()  # read at every step
        state["step"] += 1
        count, (beta1, beta2), lr = int(state["step"].item()), group["betas"], group["lr"]
        numbers = (
            1 - lr * group["weight_decay"],
            1 - beta1,
            beta2,
            1 - beta2,
            (1 - beta2**count) ** 0.5,
            group["eps"],
            lr / (1 - beta1**count),
        )
        tensors = [local(one).detach().view(-1) for one in (parameter, *(state[key] for key in ADAM))]
        gradient = local(parameter.grad).reshape(-1)
        if parameter not in self._places:
            raise AssertionError("a tensor of the optimizer whose place in the weights is unknown")
        found = []
        for place in self._places[parameter]:
            if place.size:
                weight, m, v, g = (one[place.start :][: place.size] for one in (*tensors, gradient))
                found.append(_Work(weight, g, m, v, _key(place.name, count, place.first), numbers))
        return found

    def _update(self, one: _Work, key: torch.Tensor, numbers: torch.Tensor) -> None:
        tensors = (one.weight, one.gradient, one.exp_avg, one.exp_avg_sq)
        if self.fell_back is None:
            from toolkit.model.compiling import compiler_errors, why_failed

            try:
                _kernel()(*tensors, key, numbers)
                self.calls["compiled"] += 1
                return
            except compiler_errors() as error:
                why = why_failed(error)
                self.fell_back = f"optimizer.rounding: the step runs uncompiled, which is slower: {why}"
        chunk = _CPU_CHUNK if one.weight.device.type == "cpu" else _GPU_CHUNK
        for start in range(0, one.weight.numel(), chunk):
            weight, gradient, m, v = (tensor[start : start + chunk] for tensor in tensors)
            _adamw(weight, gradient, m, v, torch.stack([key[0] + start, key[1]]), numbers)
        self.calls["uncompiled"] += 1


@dataclass(frozen=True)
class _Work:
    """Elements that are updated at once, flat, bfloat16; ``key``: of ``_bits``, ``numbers``: of ``_adamw``."""

    weight: torch.Tensor
    gradient: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    key: tuple[int, int]
    numbers: tuple[float, ...]


def _key(name: str, step: int, first: int) -> tuple[int, int]:
    """Two int32 that a weight's random bits in a step follow from, for elements from ``first`` on."""
    digest = hashlib.blake2b(f"{name}\0{step}".encode(), digest_size=8).digest()
    words = (int.from_bytes(digest[:4], "little") + first, int.from_bytes(digest[4:], "little"))
    low, high = ((word + 2**31) % 2**32 - 2**31 for word in words)
    return low, high


def _adamw(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    key: torch.Tensor,
    numbers: torch.Tensor,
) -> None:
    """One step in place, computed in float32 (arXiv:1711.05101, algorithm 2). Tensors: flat, of one length; ``key``:
    int32 (2,); ``numbers``: float32 (7,), as `StochasticAdamW` makes them."""
    g = gradient.float()
    m = exp_avg.float()
    m = m + (g - m) * numbers[1]
    v = exp_avg_sq.float() * numbers[2] + g * g * numbers[3]
    w = weight.float() * numbers[0] - numbers[6] * m / (v.sqrt() / numbers[4] + numbers[5])
    # Two halves of one word are independent, and their sum is independent of each.
    bits = _bits(weight.numel(), key)
    low, high = bits & 0xFFFF, (bits >> 16) & 0xFFFF
    weight.copy_(_rounded(w, low))
    exp_avg.copy_(_rounded(m, high))
    exp_avg_sq.copy_(_rounded(v, (low + high) & 0xFFFF))


def _bits(count: int, key: torch.Tensor) -> torch.Tensor:
    """Random int32 (count,): a function of the key and the place alone. C. Wellons' lowbias32
    (github.com/skeeto/hash-prospector) with the key's second word between its rounds; shifts are arithmetic, so the
    sign's copies are masked."""
    x = torch.arange(count, dtype=torch.int32, device=key.device) + key[0]
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ key[1]
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * (0x846CA68B - 2**32)
    return x ^ ((x >> 16) & 0xFFFF)


def _rounded(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Float32 values in bfloat16, away from zero with the probability of what is cut off: ``bits``, int32 below 2^16,
    are added to the digits that bfloat16 does not have."""
    return ((values.view(torch.int32) + bits) & -0x10000).view(torch.float32).to(torch.bfloat16)


_COMPILED: Callable[..., None] | None = None


def _kernel() -> Callable[..., None]:
    """``_adamw`` compiled for tensors of any length."""
    global _COMPILED
    if _COMPILED is None:
        from toolkit.model.compiling import compile_graph, need_compiler

        need_compiler()
        _COMPILED = torch.compile(_adamw, backend=compile_graph, dynamic=True, fullgraph=True)
    return _COMPILED


def _on(device: torch.device, table: torch.Tensor) -> torch.Tensor:
    """``table`` on the device, which the host does not wait for."""
    if device.type == "cpu":
        return table
    return table.pin_memory().to(device, non_blocking=True)
