"""FSDP2 through Accelerate: every parameter is a DTensor sharded on its first dimension."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from toolkit.errors import InputError
from toolkit.model.sources import Source, fill, sources
from toolkit.optim.adamw8bit import dense_moment, local, moment_dtype
from toolkit.optim.placed import Place
from toolkit.optimizers import optimizer_kind
from toolkit.strategies.engines.base import Engine, OptimizerState, on_host, owned
from toolkit.strategies.engines.claims import Claim, connected_claim
from toolkit.strategies.engines.pieces import Owned, Piece, Saved, Values, box, span
from toolkit.strategies.engines.prepared import Prepared
from toolkit.strategies.engines.whole import kept_whole, load_whole, whole_claims
from toolkit.strategies.fsdp import FsdpSettings
from toolkit.tasks import task_of
from toolkit.trees import leaves, mapped


class Fsdp2Engine(Engine):
    """``fully_shard`` on every block, gradients reduced in the accumulation dtype."""

    @staticmethod
    def plugin(settings: FsdpSettings, compute: str, trainable: str) -> Any:
        """accelerate's plugin for these settings. Its own mixed precision would also reduce gradients in 16 bits
        and cast the model's outputs, the loss with them (accelerate 1.15.0). torch's default for
        ``cast_forward_inputs`` rounds everything that a block is given (torch 2.13.0), rotary tables too that a model
        keeps in float32 on purpose; ``_cast_root_inputs`` does it where the model begins."""
        from accelerate import FullyShardedDataParallelPlugin
        from torch.distributed.fsdp import MixedPrecisionPolicy

        policy = None
        if compute != trainable:
            policy = MixedPrecisionPolicy(
                param_dtype=getattr(torch, compute),
                reduce_dtype=getattr(torch, trainable),
                output_dtype=None,
                cast_forward_inputs=False,
            )
        return FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=settings.reshard,
            cpu_offload=settings.offload,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=list(settings.blocks),
            state_dict_type=settings.state_dict_type,
            cpu_ram_efficient_loading=False,
            activation_checkpointing=False,
            mixed_precision_policy=policy,
        )

    @staticmethod
    def accelerator_options(settings: FsdpSettings) -> dict[str, Any]:
        """What else the Accelerator is made with: the recipe's mesh, as accelerate.yaml has it."""
        if settings.mesh is None or not settings.mesh_of_accelerate:
            return {}
        from accelerate import ParallelismConfig

        sizes = {"dp_replicate_size": settings.mesh.replicate, "dp_shard_size": settings.mesh.shard}
        sizes["tp_size"] = settings.mesh.columns
        return {"parallelism_config": ParallelismConfig(**sizes, cp_size=1, sp_size=1)}

    def engage(self, prepared: Prepared) -> None:
        if self.resolved.settings.mesh is not None and not self.resolved.settings.mesh_of_accelerate:
            self._give_mesh()
        placeholder = torch.optim.SGD(list(prepared.trainable().values()), lr=0.0)  # accelerate wants both at once
        media = task_of(self.resolved.recipe.model.task).media
        whole = kept_whole(prepared)
        load_whole(whole, prepared, self.device)
        self.kept_whole = {name: p.numel() for name, p in whole.items()}
        plugin = self.accelerator.state.fsdp_plugin
        # accelerate ends at a class that is not there, and a model may have one kind of its blocks alone.
        plugin.transformer_cls_names_to_wrap = sorted({type(block).__name__ for _, block in prepared.blocks})
        plugin.ignored_modules = [nn.ParameterList(whole.values())] if whole else None
        _check_shared(prepared)
        waiting = sources(prepared.model)
        with _embeddings_in_the_root(prepared.model, always=media is not None):
            self.model, _ = self.accelerator.prepare(prepared.model, placeholder)
        _prefetch_what_has_a_backward(self.model)
        # Otherwise ranks exchange what each has reached. torch 2.11 has no other way.
        if hasattr(self.model, "set_reduce_scatter_unused_params"):
            self.model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
        _fill(self.model, waiting, torch.device("cpu") if self.resolved.settings.offload else self.device)
        if self.resolved.precision.mixed:
            _cast_root_inputs(self.model, getattr(torch, self.resolved.precision.compute))
        self.parameters = prepared.trained_of(self.model)
        self.optimizer = self._make_optimizer(self.parameters, prepared.decayed)

    def _give_mesh(self) -> None:
        """Have accelerate shard over a mesh that its own configuration cannot have: its mesh has all processes, and
        more than one of them shards (1.15.0)."""
        from accelerate import ParallelismConfig
        from torch.distributed.device_mesh import init_device_mesh

        mesh, state = self.resolved.mesh, self.accelerator.state
        names = ("pipeline", "dp_replicate", "dp_shard_cp", "tp")
        sizes = (mesh.pipeline, mesh.replicate, mesh.shard, mesh.columns)
        state.parallelism_config = ParallelismConfig(dp_replicate_size=mesh.replicate, dp_shard_size=mesh.shard)
        state.device_mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=names)

    def accumulating(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        settings: FsdpSettings = self.resolved.settings
        if settings.last:
            self.model.set_requires_gradient_sync(last)  # type: ignore[operator]
            if not settings.reshard:
                self.model.set_reshard_after_backward(last)  # type: ignore[operator]
        return contextlib.nullcontext()

    def complete_gradients(self) -> None:
        super().complete_gradients()
        self._fill_missing()

    def clip(self, max_norm: float) -> torch.Tensor:
        norm = super().clip(max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def release(self) -> None:
        # A forward without a backward leaves the root's weights gathered, and with `reshard: false` all.
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def evidence(self) -> list[Claim]:
        tensors = {name: p for name, p in self.model.named_parameters() if isinstance(p, DTensor)}
        everything = list(self.model.parameters())
        local = sum(p.to_local().numel() for p in tensors.values())
        whole = sum(p.numel() for p in tensors.values())
        share = local / max(1, whole)
        plain = {name: p.numel() for name, p in self.model.named_parameters() if name not in tensors}
        right = sum(p.numel() / self._shards_of(name) for name, p in tensors.items()) / max(1, whole)
        # Rows are dealt out in equal chunks, so a rank holds at most a chunk more of each parameter than its part.
        bound = sum(-(-p.shape[0] // self._shards_of(name)) * (p.numel() // max(1, p.shape[0]))
                    for name, p in tensors.items())  # fmt: skip
        return [
            connected_claim(self.resolved.world_size, self.device),
            *self._mesh_claims([(self._axes(name, p), p.to_local().detach()) for name, p in tensors.items()]),
            *whole_claims(self.resolved, self.kept_whole, plain),
            Claim(
                "weights-split",
                "parameters split",
                f"{len(everything) - len(self.kept_whole)}",
                f"{len(tensors)}",
                len(tensors) == len(everything) - len(self.kept_whole),
            ),
            Claim(
                "share-of-weights",
                "weights held by this process",
                f"{100 * right:.1f} %",
                f"{100 * share:.1f} %",
                0 <= local <= bound,
            ),
        ]

    def _shards_of(self, name: str) -> int:
        """How many ranks shard a weight, or what this one has of it, between them."""
        return self.resolved.mesh.shard

    def _axes(self, name: str, tensor: DTensor) -> tuple[int, int]:
        """How many ranks hold the same part of a weight, and how many parts there are."""
        sizes = list(zip(tensor.device_mesh.shape, tensor.placements, strict=True))
        copies = math.prod(size for size, placement in sizes if placement.is_replicate())
        return copies, math.prod(size for size, placement in sizes if not placement.is_replicate())

    def full_weight(self, name: str, main_only: bool = False) -> torch.Tensor:
        return _whole(self.parameters[name], self._reads(main_only))

    def full_gradient(self, name: str) -> torch.Tensor | None:
        grad = self.parameters[name].grad
        return None if grad is None else _whole(grad)

    def full_state(self, name: str, scales: bool = False, main_only: bool = False) -> OptimizerState | None:
        parameter = self.parameters[name]
        state, keys = self.optimizer.state.get(parameter), self.moment_keys(name)
        if not state or not keys:
            return None
        reads = self._reads(main_only)
        moments = {key: _whole(dense_moment(state[key], parameter, scales), reads) for key in keys}
        steps = int(_whole(state["step"]).item()) if "step" in state else 0
        return OptimizerState(steps, moments)

    def load(self, name: str, weight: torch.Tensor, state: OptimizerState | None) -> None:
        parameter = self.parameters[name]
        with torch.no_grad():
            parameter.copy_(_split(weight, parameter))
        if state is not None:
            dtype = moment_dtype(self.optimizer, parameter)
            whole = optimizer_kind(self.resolved.recipe.optimizer.name).factored
            self.optimizer.state[parameter] = {
                **self._started(name, parameter, state),
                **{
                    key: moment.to(parameter.device, dtype) if whole else _split(moment, parameter, dtype)
                    for key, moment in state.moments.items()
                },
            }

    def own_weight(self, name: str) -> Values:
        return self._owned(name, self.parameters[name])

    def own_gradient(self, name: str) -> Values:
        grad = self.parameters[name].grad
        return [] if grad is None else self._owned(name, grad)

    def _places_of_updates(self) -> Iterator[tuple[torch.Tensor, list[Place]]]:
        for name, parameter in self.parameters.items():
            piece = _piece(parameter) if isinstance(parameter, DTensor) else span(0, parameter.numel())
            if not piece.flat:
                raise AssertionError(f"{name}: {piece} is not one range")
            yield parameter, [Place(name, piece.start[0], 0, piece.numel)]

    def pieces(self, name: str) -> Owned:
        parameter = self.parameters[name]
        state, keys = self.optimizer.state.get(parameter), self.moment_keys(name)
        moments = {key: dense_moment(state[key], parameter) for key in keys} if state else {}
        return Owned(
            self._owned(name, parameter),
            {key: self._owned(name, moment) for key, moment in moments.items()},
            {key: tuple(moment.shape) for key, moment in moments.items()},
            int(local(state.get("step", torch.zeros(()))).item()) if state and keys else None,
        )

    def _owned(self, name: str, tensor: torch.Tensor) -> Values:
        """A shard is owned by one of the ranks that hold it."""
        if not isinstance(tensor, DTensor):
            return self._divided(name, tensor)
        return owned(_piece(tensor), local(tensor).detach().reshape(-1)) if self._writes(name) else []

    def load_pieces(self, name: str, saved: Saved) -> None:
        parameter = self.parameters[name]
        factored = optimizer_kind(self.resolved.recipe.optimizer.name).factored
        if not isinstance(parameter, DTensor):
            super().load_pieces(name, saved)
            return
        piece, mine = _piece(parameter), local(parameter)
        with torch.no_grad():
            mine.copy_(saved.weight(piece).view(mine.shape))
        if saved.step is None:
            return
        dtype = moment_dtype(self.optimizer, parameter)
        moments = {}
        for key in self.moment_keys(name):
            if factored:
                moments[key] = saved.moment(key, None).to(parameter.device, dtype)
            else:
                part = saved.moment(key, piece).to(mine.device, dtype).view(mine.shape)
                moments[key] = _like(part, parameter)
        started = self._started(name, parameter, OptimizerState(saved.step, {}))
        self.optimizer.state[parameter] = {**started, **moments}


def _check_shared(prepared: Prepared) -> None:
    """Raise InputError where blocks share a weight, as Zamba's have one attention: torch ends in «Parameter 'None' is
    shared with a parameter already managed by another FSDP group»."""
    owners: dict[int, nn.Module] = {}
    for name, block in prepared.blocks:
        for key, parameter in block.named_parameters():
            owner = owners.setdefault(id(parameter), block)
            if owner is not block and block not in owner.modules() and owner not in block.modules():
                resolved = prepared.resolved
                raise InputError(
                    f"{resolved.source}: strategy.name: blocks of this model share weights ({name}.{key}), and "
                    f"{resolved.recipe.strategy.name} shards each block by itself; use zero3 or ddp"
                )


@torch.no_grad()
def _fill(model: nn.Module, waiting: Mapping[str, Source], device: torch.device) -> None:
    """Give the shards of parameters that had no memory theirs on ``device``, and read it. Offloaded ones belong in the
    host's memory: they need not pass through the device's."""
    if not waiting:
        return
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter.is_meta:  # FSDP2 takes what its modules have at the first forward
                if parameter not in made:
                    memory = torch.empty_like(parameter, device=device)
                    made[parameter] = nn.Parameter(memory, requires_grad=parameter.requires_grad)
                setattr(module, key, made[parameter])
    parameters = dict(model.named_parameters())
    for name, source in waiting.items():
        shard = parameters[name]
        assert isinstance(shard, DTensor)
        mine, piece = local(shard).detach(), _piece(shard)
        if not (piece.flat and mine.is_contiguous()):
            raise AssertionError(f"{name}: {piece} is not one range")
        fill(mine.view(-1), source, piece.start[0])


def _piece(tensor: DTensor) -> Piece:
    """Which part of the whole this rank holds."""
    size, start = list(tensor.shape), [0] * tensor.ndim
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):  # in the order of the axes, each as torch.chunk divides
            whole, rank = size[placement.dim], tensor.device_mesh.get_local_rank(axis)
            chunk = -(-whole // tensor.device_mesh.size(axis))
            first = min(chunk * rank, whole)
            size[placement.dim] = min(chunk, whole - first)
            start[placement.dim] += first
    return box(tuple(start), tuple(size), tuple(tensor.shape))


def _like(part: torch.Tensor, parameter: DTensor) -> DTensor:
    """``part`` as this rank's shard of a tensor beside ``parameter``, where that is: ``DTensor.from_local`` moves it to
    the mesh's device (torch 2.13.0), away from an offloaded weight."""
    made = torch.empty_like(parameter, dtype=part.dtype)
    assert isinstance(made, DTensor)
    local(made).copy_(part)
    return made


def _prefetch_what_has_a_backward(model: nn.Module) -> None:
    """Have a backward gather ahead only units that a gradient reaches. torch 2.13.0 gathers what came before in the
    forward, although nothing trains there (embeddings below adapters), or although it was an evaluation's last unit, of
    which it keeps the order too; it frees those weights, unused, when the backward has ended. So a unit behind none
    that is reached gathers itself ahead, which is there already."""
    alone: set[FSDPModule] = set()
    before = [False]
    """Whether the unit before, in this forward, is reached; () outside of forwards, where blocks are recomputed."""

    def begins(*_: Any) -> None:
        before[:] = [False]

    def ends(module: Any, inputs: Any, output: Any) -> None:
        if not before:
            return
        reached = any(isinstance(item, torch.Tensor) and item.requires_grad for item in leaves(output))
        if reached and before[0] == (module in alone):
            module.set_modules_to_backward_prefetch([] if before[0] else [module])
            alone.symmetric_difference_update([module])
        before[:] = [] if module is model else [reached]

    model.register_forward_pre_hook(begins)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            cast(nn.Module, module).register_forward_hook(ends)


def _cast_root_inputs(model: nn.Module, dtype: torch.dtype) -> None:
    """Have the model take floating inputs (pixels, audio features) in the dtype that its weights are gathered in."""

    def cast(module: nn.Module, args: Any, kwargs: Any) -> Any:
        def to_dtype(value: Any) -> Any:
            return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

        return mapped(to_dtype, (args, kwargs))

    model.register_forward_pre_hook(cast, with_kwargs=True)


@contextlib.contextmanager
def _embeddings_in_the_root(model: nn.Module, always: bool = False) -> Iterator[None]:
    """Accelerate 1.15.0 gives embedding and head units of their own, which torch 2.13.0 refuses where a third
    module has the same weight (T5's encoder and decoder: «shared with a parameter already managed by another
    FSDP group»). Without their names it leaves them to the root, which holds all of them together.

    ``always``: also where it would not. transformers' models of images and sound cast their input to the dtype of the
    first weight, which outside the root is still float32 then, not what it is gathered in."""
    if not always and not _shared_beyond_the_head(model):
        yield
        return
    names = ("get_input_embeddings", "get_output_embeddings")
    for name in names:
        setattr(model, name, lambda: None)
    try:
        yield
    finally:
        for name in names:
            delattr(model, name)


def _shared_beyond_the_head(model: nn.Module) -> bool:
    """Whether modules other than embedding and head have a weight in common."""
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(module)
    known = {model.get_input_embeddings(), model.get_output_embeddings()}  # type: ignore[operator]
    return any(len(modules) > 1 and not modules <= known for modules in owners.values())


def _whole(tensor: torch.Tensor, reads: bool = True) -> torch.Tensor:
    return on_host(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor, reads)


def _split(tensor: torch.Tensor, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    dtype = dtype or like.dtype
    if not isinstance(like, DTensor):
        return tensor.to(like.device, dtype)
    split = distribute_tensor(tensor.to(dtype=dtype), like.device_mesh, like.placements, src_data_rank=None)
    return split.to(like.device)  # it comes back on the mesh's device; offloaded parameters live on the host
