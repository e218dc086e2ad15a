"""single and ddp: torch's autocast over whole float32 weights, gradients averaged by DDP's buckets."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from accelerate import DistributedDataParallelKwargs
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from toolkit.model.tensor import state_group
from toolkit.optim.adamw8bit import dense_moment, moment_dtype
from toolkit.strategies.engines.base import Engine, OptimizerState, counted_steps, on_host
from toolkit.strategies.engines.claims import Claim, connected_claim
from toolkit.strategies.engines.pieces import Owned, Values
from toolkit.strategies.engines.prepared import Prepared
from toolkit.strategies.memory.replicated import BUCKET


class SingleEngine(Engine):
    """One device, no wrapper."""

    def engage(self, prepared: Prepared) -> None:
        self.model = self.wrap(prepared.model.to(self.device))
        self.parameters = prepared.trainable()
        self.optimizer = self._make_optimizer(self.parameters, prepared.decayed)

    def wrap(self, model: nn.Module) -> nn.Module:
        return model

    def complete_gradients(self) -> None:
        super().complete_gradients()
        self._fill_missing()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if not self.resolved.precision.mixed:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=getattr(torch, self.resolved.precision.compute))

    def evidence(self) -> list[Claim]:
        return [connected_claim(self.resolved.world_size, self.device)]

    def full_weight(self, name: str, main_only: bool = False) -> torch.Tensor:
        return on_host(self.parameters[name], self._reads(main_only))

    def full_gradient(self, name: str) -> torch.Tensor | None:
        grad = self.parameters[name].grad
        return None if grad is None else on_host(grad)

    def full_state(self, name: str, scales: bool = False, main_only: bool = False) -> OptimizerState | None:
        parameter = self.parameters[name]
        state, keys = self.optimizer.state.get(parameter), self.moment_keys(name)
        if not state or not keys:
            return None
        reads = self._reads(main_only)
        moments = {key: on_host(dense_moment(state[key], parameter, scales, reads), reads) for key in keys}
        return OptimizerState(counted_steps(state), moments)

    def load(self, name: str, weight: torch.Tensor, state: OptimizerState | None) -> None:
        parameter = self.parameters[name]
        with torch.no_grad():
            parameter.copy_(weight)
        if state is not None:
            dtype = moment_dtype(self.optimizer, parameter)
            self.optimizer.state[parameter] = {
                **self._started(name, parameter, state),
                **{key: moment.to(parameter.device, dtype).clone() for key, moment in state.moments.items()},
            }

    def own_weight(self, name: str) -> Values:
        return self._divided(name, self.parameters[name])

    def own_gradient(self, name: str) -> Values:
        grad = self.parameters[name].grad
        return [] if grad is None else self._divided(name, grad)

    def pieces(self, name: str) -> Owned:
        parameter = self.parameters[name]
        state, keys = self.optimizer.state.get(parameter), self.moment_keys(name)
        moments = {key: dense_moment(state[key], parameter) for key in keys} if state else {}
        return Owned(
            self._divided(name, parameter),
            {key: self._divided(name, moment) for key, moment in moments.items()},
            {key: tuple(moment.shape) for key, moment in moments.items()},
            counted_steps(state) if state and keys else None,
        )


class DdpEngine(SingleEngine):
    """torch's DistributedDataParallel, made by Accelerate."""

    def engage(self, prepared: Prepared) -> None:
        varies = bool(prepared.reach.by_row) or prepared.reach.unsure
        self.accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=varies)
        super().engage(prepared)

    def wrap(self, model: nn.Module) -> nn.Module:
        if self.pipeline is None:
            return self.accelerator.prepare_model(model)
        # DDP itself begins to sum gradients in the backward that follows the last forward, which with stages is an
        # earlier micro-batch's. As DDP does: the first rank's weights are those of all copies.
        first, group = self.resolved.mesh.state_peers(dist.get_rank())[0], state_group(self.resolved)
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), first, group=group)
        return model

    def accumulating(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        if last or self.pipeline is not None or self.resolved.reduces_each_micro_batch:
            return contextlib.nullcontext()
        return self.accelerator.no_sync(self.model)

    def complete_gradients(self) -> None:
        super().complete_gradients()
        if self.pipeline is not None:
            self._average()

    def _average(self) -> None:
        """Average gradients over the ranks that have the same blocks, once per step."""
        copies = self.resolved.mesh.replicate
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        if copies == 1:
            return
        for bucket in _buckets(gradients):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket]).div_(copies)
            dist.all_reduce(flat, group=state_group(self.resolved))
            for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(part.view_as(gradient))

    def evidence(self) -> list[Claim]:
        if self.pipeline is not None:
            parts = [((self.resolved.mesh.replicate, 1), p.data) for p in self.parameters.values()]
            return [*super().evidence(), *self._mesh_claims(parts)]
        wrapped = isinstance(self.model, DistributedDataParallel)
        seen = type(self.model).__name__
        return [*super().evidence(), Claim("model-wrapped", "model wrapped", "DistributedDataParallel", seen, wrapped)]


def _buckets(gradients: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Gradients of one dtype and about 25 MiB each, in order."""
    found: list[list[torch.Tensor]] = []
    size = 0
    for gradient in gradients:
        if not found or size >= BUCKET or found[-1][0].dtype != gradient.dtype:
            found.append([])
            size = 0
        found[-1].append(gradient)
        size += gradient.nbytes
    return found
