"""A mutation made at random: something is wrong in a gradient, a moment, a weight or a batch, by any amount.

Known faults show that known defects are found; mutations show from what size on any defect is.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from toolkit.verification.faults.base import Fault, Patch
from toolkit.verification.faults.helpers import after_adamw

KINDS = ("gradient scale", "gradient noise", "gradient drop", "gradient round", "gradient delay", "gradient transpose",
         "moment scale", "weight noise", "label swap")  # fmt: skip


class Mutation(Fault):
    """``kind`` done to one thing picked by ``seed``, from the second step on; ``size`` is its relative error, or the
    least that it can be. ``only``: in this pass alone."""

    id = "none"
    title = "a mutation made at random"
    stages = ()

    def __init__(self, kind: str, size: float, seed: int, only: str | None = None) -> None:
        super().__init__()
        self.only = only
        self.kind, self.size, self.seed = kind, size, seed
        self._before: torch.Tensor | None = None

    def inject(self, patch: Patch, case: Any) -> None:
        if self.only not in (None, case.pass_name):
            return
        what = self.kind.split()[0]
        if what == "gradient":
            self._gradients(patch)
        elif what == "label":
            self._labels(patch)
        else:
            after_adamw(patch, self._moments if what == "moment" else self._weights)

    def _gradients(self, patch: Patch) -> None:
        """In the parameter's own gradient: once it is whole for torch's engines, as it arrives for DeepSpeed's."""
        from toolkit.strategies.engines.base import Engine
        from toolkit.strategies.engines.zero import ZeroEngine

        @patch.replacing(Engine, "unscale")
        def unscale(right: Any, engine: Any) -> None:
            right(engine)
            if not isinstance(engine, ZeroEngine):
                with torch.no_grad():
                    parameter = self._pick([p for p in engine.parameters.values() if p.grad is not None])
                    local = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
                    local.copy_(self._changed(local))

        @patch.replacing(ZeroEngine, "engage")
        def engage(right: Any, engine: Any, prepared: Any) -> None:
            right(engine, prepared)  # first: loading by part makes the parameters anew
            self._pick(list(prepared.trainable().values())).register_hook(self._changed)

    def _changed(self, tensor: torch.Tensor) -> torch.Tensor:
        changed = self._change(tensor)
        if not torch.equal(changed, tensor):
            self.reached()
        return changed

    def _change(self, tensor: torch.Tensor) -> torch.Tensor:
        how = self.kind.split()[1]
        if how == "scale":
            return tensor * (1 + self.size)
        if how == "drop":
            # As many of the smallest elements as are worth ``size`` of the norm.
            flat = tensor.reshape(-1).clone()
            order = flat.abs().argsort()
            worth = flat[order].double().pow(2).cumsum(0)
            flat[order[: int((worth < self.size**2 * worth[-1]).sum()) + 1]] = 0
            return flat.view(tensor.shape)
        if how == "round":
            # Rounding to steps of a mantissa (1/2 to 1) errs by a step over the root of 12, of at most 1.
            steps = 1 / (math.sqrt(12) * self.size)
            mantissa, exponent = torch.frexp(tensor)
            return torch.ldexp((mantissa * steps).round() / steps, exponent)
        if how == "delay":
            before, self._before = self._before, tensor.detach().clone()
            return tensor if before is None or before.shape != tensor.shape else before
        if how == "transpose":
            square = tensor.ndim == 2 and tensor.shape[0] == tensor.shape[1]
            return tensor.t().contiguous() if square else tensor.flip(0)
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(self.seed)).to(tensor.device)
        added = noise * (self.size * tensor.float().norm() / noise.norm().clamp(min=1e-30))
        return (tensor.float() + added).to(tensor.dtype)  # autograd takes no gradient of another dtype

    def _moments(self, optimizer: Any) -> None:
        states = [state for state in optimizer.state.values() if "exp_avg_sq" in state]
        if states:
            self.reached()
            self._pick(states)["exp_avg_sq"].mul_(1 + self.size)

    def _weights(self, optimizer: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.numel()]
        parameter = self._pick(parameters)
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        self.reached()
        local.add_(torch.randn_like(local) * (self.size * local.norm() / math.sqrt(max(1, local.numel()))))

    def _labels(self, patch: Patch) -> None:
        from dataclasses import replace

        from toolkit.data import loader

        @patch.replacing(loader, "collate")
        def collate(right: Any, *args: Any, **kwargs: Any) -> Any:
            micro = right(*args, **kwargs)
            labels = micro.tensors["labels"].clone()
            if micro.sample_ids and labels.ndim == 2:
                self.reached()
                labels[0, 1] = labels[0, 1] + 1 if labels[0, 1] >= 0 else 3
            return replace(micro, tensors=micro.tensors | {"labels": labels})

    def _pick(self, things: list[Any]) -> Any:
        return things[self.seed % len(things)]
