"""FSDP1 through Accelerate: blocks as flat parameters; whole tensors are put together from the ranks' slices."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from toolkit.strategies.engines.base import MOMENTS, Claim, Engine, OptimizerState, Prepared, connected_claim
from toolkit.strategies.fsdp import FsdpSettings
from toolkit.training.adamw8bit import dense_moment, moment_dtype
from toolkit.training.optimizer import make_adamw


class Fsdp1Engine(Engine):
    """A flat parameter per block. ``use_orig_params``: a block may hold frozen and trained weights."""

    @staticmethod
    def plugin(settings: FsdpSettings, compute: str, trainable: str) -> Any:
        """accelerate's plugin; gradients are reduced in the accumulation dtype, buffers keep their own."""
        from accelerate import FullyShardedDataParallelPlugin
        from torch.distributed.fsdp import MixedPrecision

        policy = None
        if compute != trainable:
            policy = MixedPrecision(
                param_dtype=getattr(torch, compute),
                reduce_dtype=getattr(torch, trainable),
                buffer_dtype=None,
                cast_forward_inputs=True,
            )
        return FullyShardedDataParallelPlugin(
            fsdp_version=1,
            sharding_strategy="FULL_SHARD" if settings.reshard else "SHARD_GRAD_OP",
            cpu_offload=settings.offload,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=list(settings.blocks),
            state_dict_type=settings.state_dict_type,
            use_orig_params=True,
            # Every process loads or draws the same weights; the broadcast needs a GPU in accelerate 1.15.0.
            sync_module_states=False,
            cpu_ram_efficient_loading=False,
            activation_checkpointing=False,
            backward_prefetch="BACKWARD_PRE",
            forward_prefetch=False,
            mixed_precision_policy=policy,
        )

    def engage(self, prepared: Prepared) -> None:
        plugin = self.accelerator.state.fsdp_plugin
        plugin.auto_wrap_policy = functools.partial(
            _own_unit,
            blocks=frozenset(self.resolved.blocks),
            apart=any(not p.requires_grad for p in prepared.model.parameters()),
        )
        self.model = self.accelerator.prepare_model(prepared.model)
        self.parameters = {_clean(name): p for name, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = self._make_optimizer(self.parameters, prepared.decayed)

    def _make_scaler(self) -> Any:
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        return ShardedGradScaler(self.device.type, init_scale=self._initial_scale())

    def _make_optimizer(self, parameters: Mapping[str, nn.Parameter], decayed: frozenset[str]) -> torch.optim.Optimizer:
        # torch 2.13.0: fused AdamW cannot subtract ShardedGradScaler's found_inf, of shape (1,), from its step.
        fused = not self.resolved.precision.loss_scaling
        return make_adamw(parameters, decayed, self.resolved.recipe.optimizer, fused=fused)

    def clip(self, max_norm: float) -> torch.Tensor:
        assert isinstance(self.model, FullyShardedDataParallel)
        return self.model.clip_grad_norm_(max_norm if max_norm > 0 else float("inf"))

    def evidence(self) -> list[Claim]:
        units = FullyShardedDataParallel.fsdp_modules(self.model)
        handles = [unit._handle for unit in units if unit._handle is not None]
        local = sum(handle.flat_param.numel() for handle in handles)
        whole = sum(handle.flat_param._unpadded_unsharded_size.numel() for handle in handles)
        world = self.resolved.world_size
        share = local / max(1, whole)
        # Each flat parameter is padded to a multiple of the ranks.
        ok = bool(handles) and local * world <= whole + len(handles) * world
        return [
            connected_claim(world, self.device),
            Claim(
                "units wrapped",
                f"more than {len(self.blocks)}",
                str(len(units)),
                len(units) > len(self.blocks),
            ),
            Claim("share of the weights here", f"{100 / world:.1f} %", f"{100 * share:.1f} %", ok),
        ]

    def full_weight(self, name: str) -> torch.Tensor:
        return self._whole(name, self.parameters[name])

    def full_gradient(self, name: str) -> torch.Tensor | None:
        grad = self.parameters[name].grad
        missing = torch.tensor([grad is None and self.parameters[name].numel() > 0], device=self.device).float()
        dist.all_reduce(missing)
        if missing.item():
            return None
        return self._whole(name, self.parameters[name].new_empty(0) if grad is None else grad)

    def full_state(self, name: str, scales: bool = False) -> OptimizerState | None:
        state = self.optimizer.state.get(self.parameters[name]) or {}
        steps = torch.tensor(float(state["step"].item()) if state else -1.0, device=self.device)
        dist.all_reduce(steps, op=dist.ReduceOp.MAX)
        if steps.item() < 0:
            return None
        parameter = self.parameters[name]
        empty = parameter.new_empty(0, dtype=moment_dtype(self.optimizer, parameter))
        moments = {key: self._whole(name, dense_moment(state.get(key, empty), parameter, scales)) for key in MOMENTS}
        return OptimizerState(int(steps.item()), moments)

    def load(self, name: str, weight: torch.Tensor, state: OptimizerState | None) -> None:
        parameter = self.parameters[name]
        start = sum(self._sizes(parameter)[: dist.get_rank()])

        def part(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
            flat = tensor.reshape(-1)[start : start + parameter.numel()]
            return flat.view(parameter.shape).to(parameter.device, dtype).clone()

        with torch.no_grad():
            parameter.copy_(part(weight, parameter.dtype))
        if state is not None:
            dtype = moment_dtype(self.optimizer, parameter)
            self.optimizer.state[parameter] = {
                "step": torch.tensor(float(state.step), device=parameter.device),
                **{key: part(state.moments[key], dtype) for key in MOMENTS},
            }

    def _sizes(self, local: torch.Tensor) -> list[int]:
        sizes = torch.zeros(self.resolved.world_size, device=self.device, dtype=torch.int64)
        sizes[dist.get_rank()] = local.numel()
        dist.all_reduce(sizes)
        return sizes.tolist()

    def _whole(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """A parameter's slices lie in the order of the ranks; each rank holds a contiguous run of its elements."""
        sizes = self._sizes(local)
        parts = [torch.empty(max(sizes), device=self.device, dtype=local.dtype) for _ in sizes]
        mine = torch.zeros(max(sizes), device=self.device, dtype=local.dtype)
        mine[: local.numel()] = local.detach().reshape(-1).to(self.device)
        dist.all_gather(parts, mine)
        flat = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
        return flat.view(self.shapes[name]).cpu()

    @contextlib.contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        with FullyShardedDataParallel.summon_full_params(self.model, writeback=False):
            yield self.accelerator.unwrap_model(self.model)


def _own_unit(module: nn.Module, recurse: bool, nonwrapped_numel: int, *, blocks: frozenset[str], apart: bool) -> bool:
    """FSDP's wrap policy: blocks, and where part of the model is frozen each trained layer ``apart``. A flat
    parameter has one dtype («Must flatten tensors with uniform dtype», torch 2.13.0), and one that trains in part
    has a gradient for all of it, the frozen base's with it."""
    if recurse:
        return True
    if type(module).__name__ in blocks:
        return True
    own = list(module.parameters(recurse=False))
    return apart and not list(module.children()) and any(p.requires_grad for p in own)


def _clean(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")
