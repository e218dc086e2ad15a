"""FSDP1 through Accelerate: blocks as flat parameters; whole tensors are assembled from the ranks' slices."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from toolkit.errors import InputError
from toolkit.machine import give_back_memory
from toolkit.model.sources import fill, set_values, sources
from toolkit.optim.adamw8bit import dense_moment, moment_dtype
from toolkit.optim.placed import Place
from toolkit.recipe.shared_weights import why_not_in_units
from toolkit.strategies.engines.base import Engine, OptimizerState, counted_steps, owned
from toolkit.strategies.engines.claims import Claim, connected_claim
from toolkit.strategies.engines.fsdp1_units import OwnUnits
from toolkit.strategies.engines.pieces import Owned, Piece, Saved, Values, span
from toolkit.strategies.engines.prepared import Prepared
from toolkit.strategies.engines.whole import kept_whole, load_whole, whole_claims
from toolkit.strategies.fsdp import FsdpSettings
from toolkit.upstream import torch_fsdp as upstream


class Fsdp1Engine(Engine):
    """A flat parameter per block, and where part of the model is frozen one more of what trains in the block."""

    @staticmethod
    def plugin(settings: FsdpSettings, compute: str, trainable: str) -> Any:
        """accelerate's plugin; gradients are reduced in the accumulation dtype, buffers keep their own. Floating inputs
        are cast where the model begins and nowhere else: a block would round rotary tables that a model keeps in
        float32 on purpose."""
        from accelerate import FullyShardedDataParallelPlugin
        from torch.distributed.fsdp import MixedPrecision

        policy = None
        if compute != trainable:
            policy = MixedPrecision(
                param_dtype=getattr(torch, compute),
                reduce_dtype=getattr(torch, trainable),
                buffer_dtype=None,
                cast_forward_inputs=False,
                cast_root_forward_inputs=True,
            )
        return FullyShardedDataParallelPlugin(
            fsdp_version=1,
            sharding_strategy=settings.sharding_strategy,
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

    @staticmethod
    def accelerator_options(settings: FsdpSettings) -> dict[str, Any]:
        """What else the Accelerator is made with: nothing."""
        return {}

    def engage(self, prepared: Prepared) -> None:
        if why := upstream.no_flat_parameters():
            name = f"{self.resolved.source}: strategy.name: fsdp1"
            raise InputError(f"{name} is not possible with this torch ({why}); use fsdp2")
        plugin = self.accelerator.state.fsdp_plugin
        apart = any(not p.requires_grad for p in prepared.model.parameters())
        if apart and (shared := _trained_twice(prepared.model)):
            raise InputError(f"{self.resolved.source}: strategy.name: {why_not_in_units(shared)}")
        if apart and (name := _exchanges_weights(prepared.model)):
            reason = self.resolved.traits.why_no_expert_adapters
            raise InputError(f"{self.resolved.source}: strategy.name: {reason} ({name})")
        own_units = OwnUnits(prepared.model, frozenset(self.resolved.blocks))
        if prepared.frozen and (names := own_units.frozen_in_part()):
            raise InputError(
                f"{self.resolved.source}: model.freeze: outside of the blocks fsdp1 shards the weights of a layer as "
                f"one flat parameter, so they are all trained or all frozen, but here {names[0]} is trained and "
                f"{names[1]} is not; freeze or train both, or use fsdp2"
            )
        plugin.auto_wrap_policy = own_units.policy
        mesh = self._device_mesh()
        self._group = None if mesh is None else mesh.get_group("dp_shard")
        whole = kept_whole(prepared)
        load_whole(whole, prepared, self.device)
        self.kept_whole = {name: p.numel() for name, p in whole.items()}
        plugin.ignored_modules = [nn.ParameterList(whole.values())] if whole else None
        waiting = sources(prepared.model)
        lent = _lend_memory(prepared.model, self.device)
        with _on_mesh(mesh), _units_without_values(lent), own_units.divided():
            self.model = self.accelerator.prepare_model(prepared.model)
        self.parameters = {_clean(name): p for name, p in self.model.named_parameters() if p.requires_grad}
        self._places = _places(self.model)
        for name, parameter in self.model.named_parameters():
            if (source := waiting.get(_clean(name))) is not None:
                fill(parameter.detach().view(-1), source, self._places[id(parameter)].start[0])
        self.optimizer = self._make_optimizer(self.parameters, prepared.decayed)

    def accumulating(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        if last or self.resolved.reduces_each_micro_batch:
            return contextlib.nullcontext()
        return self.accelerator.no_sync(self.model)

    def _device_mesh(self) -> Any:
        """The recipe's groups, where some ranks hold copies; None: one group of all."""
        from torch.distributed.device_mesh import init_device_mesh

        mesh = self.resolved.mesh
        if not mesh.hybrid:
            return None
        names = ("dp_replicate", "dp_shard")
        return init_device_mesh(self.device.type, (mesh.replicate, mesh.shard), mesh_dim_names=names)

    def _make_scaler(self) -> Any:
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        return ShardedGradScaler(self.device.type, init_scale=self._initial_scale())

    def _make_optimizer(self, parameters: Mapping[str, nn.Parameter], decayed: frozenset[str]) -> torch.optim.Optimizer:
        # torch 2.13.0: fused AdamW cannot subtract ShardedGradScaler's found_inf, of shape (1,), from its step.
        fused = not self.resolved.precision.loss_scaling
        return self._optimizer_over(parameters, decayed, fused=fused)

    def clear_gradients(self) -> None:
        super().clear_gradients()
        for handle in _handles(self.model):
            upstream.drop_flat_gradient(handle)

    def clip(self, max_norm: float) -> torch.Tensor:
        assert isinstance(self.model, FullyShardedDataParallel)
        return self.model.clip_grad_norm_(max_norm if max_norm > 0 else float("inf"))

    def release(self) -> None:
        for unit in FullyShardedDataParallel.fsdp_modules(self.model):
            upstream.shard_again(unit)

    def evidence(self) -> list[Claim]:
        units = FullyShardedDataParallel.fsdp_modules(self.model)
        handles = _handles(self.model)
        local = sum(handle.flat_param.numel() for handle in handles)
        whole = sum(map(upstream.whole_size, handles))
        plain = {name: p.numel() for name, p in ((_clean(name), p) for name, p in self.model.named_parameters())
                 if id(p) not in self._places}  # fmt: skip
        ranks = self.resolved.mesh.shard
        share = local / max(1, whole)
        # Each flat parameter is padded to a multiple of the ranks.
        ok = bool(handles) and local * ranks <= whole + len(handles) * ranks
        parts = [((upstream.copies_of(unit), unit.world_size), handle.flat_param.detach())
                 for unit in units if (handle := upstream.handle_of(unit)) is not None]  # fmt: skip
        return [
            connected_claim(self.resolved.world_size, self.device),
            *self._mesh_claims(parts),
            Claim(
                "weights-split",
                "units wrapped",
                f"more than {len(self.blocks)}",
                str(len(units)),
                len(units) > len(self.blocks),
            ),
            *whole_claims(self.resolved, self.kept_whole, plain),
            Claim(
                "share-of-weights",
                "weights held by this process",
                f"{100 / ranks:.1f} %",
                f"{100 * share:.1f} %",
                ok,
            ),
        ]

    def full_weight(self, name: str, main_only: bool = False) -> torch.Tensor:
        return self._whole(name, self.parameters[name], main_only)

    def full_gradient(self, name: str) -> torch.Tensor | None:
        grad = self.parameters[name].grad
        missing = torch.tensor([grad is None and self.parameters[name].numel() > 0], device=self.device).float()
        dist.all_reduce(missing)
        if missing.item():
            return None
        return self._whole(name, self.parameters[name].new_empty(0) if grad is None else grad)

    def full_state(self, name: str, scales: bool = False, main_only: bool = False) -> OptimizerState | None:
        state = self.optimizer.state.get(self.parameters[name]) or {}
        keys = self.moment_keys(name)
        steps = torch.tensor(float(counted_steps(state)) if state else -1.0, device=self.device)
        dist.all_reduce(steps, op=dist.ReduceOp.MAX)
        if steps.item() < 0 or not keys:
            return None
        parameter = self.parameters[name]
        empty = parameter.new_empty(0, dtype=moment_dtype(self.optimizer, parameter))
        moments = {
            key: self._whole(name, dense_moment(state.get(key, empty), parameter, scales), main_only) for key in keys
        }
        return OptimizerState(int(steps.item()), moments)

    def load(self, name: str, weight: torch.Tensor, state: OptimizerState | None) -> None:
        parameter = self.parameters[name]
        start = sum(self._sizes(parameter)[: self.place])

        def part(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
            flat = tensor.reshape(-1)[start : start + parameter.numel()]
            return flat.view(parameter.shape).to(parameter.device, dtype).clone()

        with torch.no_grad():
            parameter.copy_(part(weight, parameter.dtype))
        if state is not None:
            dtype = moment_dtype(self.optimizer, parameter)
            self.optimizer.state[parameter] = {
                **self._started(name, parameter, state),
                **{key: part(moment, dtype) for key, moment in state.moments.items()},
            }

    def own_weight(self, name: str) -> Values:
        return owned(self._own_piece(name), self.parameters[name].detach().reshape(-1))

    def _own_piece(self, name: str) -> Piece:
        """Of the ranks that hold copies of a part, one owns it."""
        return self._places[id(self.parameters[name])] if self._writes(name) else span(0, 0)

    def own_gradient(self, name: str) -> Values:
        grad = self.parameters[name].grad
        return [] if grad is None else owned(self._own_piece(name), grad.detach().reshape(-1))

    def _places_of_updates(self) -> Iterator[tuple[torch.Tensor, list[Place]]]:
        for name, parameter in self.parameters.items():
            piece = self._places[id(parameter)]
            yield parameter, [Place(name, piece.start[0], 0, piece.numel)]

    def pieces(self, name: str) -> Owned:
        parameter, piece = self.parameters[name], self._own_piece(name)
        state, keys = self.optimizer.state.get(parameter), self.moment_keys(name)
        moments = {key: dense_moment(state[key], parameter) for key in keys} if state else {}
        return Owned(
            owned(piece, parameter.detach().reshape(-1)),
            {key: owned(piece, moment.reshape(-1)) for key, moment in moments.items()},
            dict.fromkeys(moments, self.shapes[name]),
            counted_steps(state) if state and keys else None,
        )

    def load_pieces(self, name: str, saved: Saved) -> None:
        parameter, piece = self.parameters[name], self._places[id(self.parameters[name])]
        with torch.no_grad():
            parameter.copy_(saved.weight(piece).view(parameter.shape))
        if saved.step is None:
            return
        dtype = moment_dtype(self.optimizer, parameter)
        self.optimizer.state[parameter] = {
            **self._started(name, parameter, OptimizerState(saved.step, {})),
            **{
                key: saved.moment(key, piece).to(parameter.device, dtype).view(parameter.shape)
                for key in self.moment_keys(name)
            },
        }

    def _sizes(self, local: torch.Tensor) -> list[int]:
        """Elements of a parameter by a rank's place in its group."""
        sizes = torch.zeros(self.resolved.mesh.shard, device=self.device, dtype=torch.int64)
        sizes[self.place] = local.numel()
        dist.all_reduce(sizes, group=self._group)
        return sizes.tolist()

    def _whole(self, name: str, local: torch.Tensor, main_only: bool = False) -> torch.Tensor:
        """A parameter's slices lie in the order of the ranks; each rank holds a contiguous run of its elements.

        Each owner broadcasts its slice into its place, within the group of ranks that divide a parameter. A rank that
        reads holds the whole on its device, any other one slice at a time. (NCCL makes a communicator for every pair
        that sends directly, which takes memory and time.)
        """
        sizes, reads = self._sizes(local), self._reads(main_only)
        local = local.detach().reshape(-1).to(self.device)
        whole = torch.empty(sum(sizes), device=self.device if reads else "meta", dtype=local.dtype)
        start = 0
        for at, size in enumerate(sizes):
            place, mine = whole[start : start + size], at == self.place
            start += size
            if not size:
                continue
            if mine and reads:
                place.copy_(local)
            elif mine:
                place = local
            elif not reads:
                place = local.new_empty(size)
            dist.broadcast(place, group_src=at, group=self._group)
        return whole.view(self.shapes[name]) if whole.is_meta else whole.view(self.shapes[name]).cpu()

    @contextlib.contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        with FullyShardedDataParallel.summon_full_params(self.model, writeback=False):
            yield self.accelerator.unwrap_model(self.model)


@contextlib.contextmanager
def _units_without_values(lent: set[int]) -> Iterator[None]:
    """Context in which no process writes or copies a whole unit of parameters whose memory is ``lent`` (by address).

    torch 2.13.0 has each unit whole on its device, put together from its parameters, before it is sharded. Here the
    unit's memory is not written, so that a host has no pages of it, and goes back to the system with the shard: glibc
    kept nearly the whole model, where a shard got the beginning of that memory and the next unit did not fit there.
    The shard is zero until each parameter is read, and its padding stays so.
    """
    unwritten: set[int] = set()

    def flattened(flatten: Any, handle: Any, tensors: list[torch.Tensor], aligned_numel: int) -> Any:
        if any(tensor.data_ptr() not in lent for tensor in tensors):
            return flatten(handle, tensors, aligned_numel)
        size = flatten(handle, [tensor.to("meta") for tensor in tensors], aligned_numel)
        unwritten.add(id(handle))
        return torch.empty(size.shape, dtype=size.dtype, device=tensors[0].device)

    def sharded(shard: Any, handle: Any) -> None:
        shard(handle)
        if id(handle) in unwritten:
            handle.flat_param.detach().zero_()
        give_back_memory()

    with upstream.flattened_by(flattened, sharded):
        yield


@contextlib.contextmanager
def _on_mesh(mesh: Any) -> Iterator[None]:
    """Have FSDP made on ``mesh``: accelerate 1.15.0 has no key for it, and HYBRID_SHARD's own groups are a node's
    GPUs."""
    if mesh is None:
        yield
        return
    right = FullyShardedDataParallel.__init__

    @functools.wraps(right)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        right(self, *args, **(kwargs | {"device_mesh": mesh}))

    FullyShardedDataParallel.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        FullyShardedDataParallel.__init__ = right  # type: ignore[method-assign]


def _handles(model: nn.Module) -> list[Any]:
    """What shards the flat parameter of each unit that has one."""
    found = map(upstream.handle_of, FullyShardedDataParallel.fsdp_modules(model))
    return [handle for handle in found if handle is not None]


def _lend_memory(model: nn.Module, device: torch.device) -> set[int]:
    """Give all parameters that are loaded by part the same memory, of the largest of them: FSDP1 makes its flat
    parameters out of tensors with memory (torch 2.13.0), whatever is in it, and each rank then reads its slices. On
    the device: FSDP would move each there by itself, a unit's weights beside its flat parameter. Returns addresses."""
    largest: dict[torch.dtype, int] = {}
    waiting = [parameter for parameter in model.parameters() if parameter.is_meta]
    for parameter in waiting:
        largest[parameter.dtype] = max(parameter.numel(), largest.get(parameter.dtype, 0))
    lent = {dtype: torch.empty(size, dtype=dtype, device=device) for dtype, size in largest.items()}
    for parameter in waiting:
        set_values(parameter, lent[parameter.dtype][: parameter.numel()].view(parameter.shape))
    return {memory.data_ptr() for memory in lent.values()}


def _places(model: nn.Module) -> dict[int, Piece]:
    """By a parameter's id, which elements of the flattened weight this rank holds, by FSDP's layout (torch 2.13.0)."""
    slices = (one for handle in _handles(model) for one in upstream.slices_of(handle))
    return {id(parameter): span(start, stop) for parameter, start, stop in slices}


def _trained_twice(model: nn.Module) -> list[str]:
    """Names of one trained weight that several modules have; none where there is no such weight."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(id(parameter), []).append(name)
    return next((shared for shared in names.values() if len(shared) > 1), [])


def _exchanges_weights(model: nn.Module) -> str:
    """A module that exchanges a weight of another while it computes: PEFT 0.21.2's ``ParamWrapper`` registers a
    parametrization, which takes parameters, not views. Empty if there is none."""
    return next((name for name, module in model.named_modules() if type(module).__name__ == "ParamWrapper"), "")


def _clean(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")
