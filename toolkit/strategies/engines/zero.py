"""ZeRO 1, 2 and 3 with DeepSpeed's engine, created by Accelerate from the values of deepspeed.json."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from toolkit.errors import InputError
from toolkit.model.packed_layers import packed_weights
from toolkit.model.sources import Cast, Source, fill, set_values, source_of, sources
from toolkit.model.unreached import leaves_of
from toolkit.optim.placed import Place
from toolkit.recipe.resolve import Resolved
from toolkit.strategies import strategy_of
from toolkit.strategies.engines.base import Engine, OptimizerState, Step
from toolkit.strategies.engines.claims import Claim, connected_claim
from toolkit.strategies.engines.pieces import Owned, Piece, Saved, Values
from toolkit.strategies.engines.prepared import Prepared
from toolkit.strategies.engines.whole import kept_whole, load_whole, whole_claims
from toolkit.strategies.engines.zero_state import ZeroTensors, fill_partition, partition
from toolkit.strategies.zero_settings import ZeroSettings
from toolkit.upstream import deepspeed as upstream


class ZeroEngine(Engine):
    """DeepSpeed scales, clips and steps; the loop signals the end of a window."""

    def engage(self, prepared: Prepared) -> None:
        model, stage = prepared.model, self.resolved.settings.stage
        if stage < 3 and (why := upstream.no_fragments()):
            name = f"{self.resolved.source}: strategy.name: zero{stage}"
            raise InputError(f"{name} is not possible with this DeepSpeed ({why}); use zero3 or fsdp2")
        self.parameters = prepared.trainable()
        reach = prepared.reach
        strategy_of(self.resolved).check_reach(reach.by_row, self.resolved, by_values=reach.by_values)
        self.unsure = reach.unsure
        waiting = sources(model)
        whole = kept_whole(prepared)
        self.kept_whole = {name: p.numel() for name, p in whole.items()}
        load_whole(whole, prepared, self.device)
        _as_buffers(model, whole)
        originals = _lossy_copies(self.parameters, self.resolved.precision.compute)
        if stage == 3:
            upstream.forget_second_copies()
            _round_once()
            _split(model, self.resolved, self.device)
        optimizer = self._make_optimizer(self.parameters, prepared.decayed)
        self.engine: Any
        self.engine, _ = self.accelerator.prepare(model, optimizer)
        # Its hooks are on autograd's nodes, where Python's collector does not see that they hold the engine: left to
        # itself none is ever freed.
        weakref.finalize(self, self.engine.destroy).atexit = False
        self.model = self.engine
        self.optimizer = self.engine.optimizer
        self.tensors = ZeroTensors(self.engine)
        for name, original in originals.items():
            self.tensors.set_weight(self.parameters[name], original)
        for name in self._rounded(waiting):
            parameter = self.parameters[name]  # what forwards gather has its values, hpZ's second copy too
            self.tensors.load_master(parameter, _read(waiting[name], self.dtypes[name], partition(parameter)))

    def _rounded(self, waiting: Mapping[str, Source]) -> list[str]:
        """Names of trained weights that are loaded by part and that 16 bits cannot hold: DeepSpeed 0.19.8 makes its
        float32 masters from the 16-bit copy. Those of a file in the same 16 bits are not read a second time."""
        precision = self.resolved.precision
        if precision.compute == precision.trainable:
            return []
        dtype = getattr(torch, precision.compute)
        sources = {name: waiting[name] for name in self.parameters if name in waiting}
        return [name for name, one in sources.items() if not (isinstance(one, Cast) and one.exact_in(dtype))]

    def _make_scaler(self) -> Any:
        return None  # DeepSpeed's own

    def accumulating(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        self.engine.set_gradient_accumulation_boundary(is_boundary=last)
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        if self.unsure:
            apart = _reached_apart(loss, self.parameters, self.device)
            strategy_of(self.resolved).check_reach(apart, self.resolved)
        # The window's weights are in the loss already; DeepSpeed shall not divide by its accumulation count.
        self.engine.backward(loss, scale_wrt_gas=False)
        if not last:
            self.engine.step()  # counts the micro-batch, updates nothing

    def step(self, lr: float) -> Step:
        self.set_lr(lr)
        self.engine.step()
        norm = self.engine.get_global_grad_norm()
        skipped = bool(getattr(self.optimizer, "overflow", False))
        if skipped:
            norm = float("inf")  # DeepSpeed keeps the last good step's norm
        return Step(torch.as_tensor(norm, dtype=torch.float32), skipped)

    def skip(self) -> Step:
        # As DeepSpeed drops a step that overflowed: buffers, counters and the place in the window go with it.
        with _overflowing(self.optimizer):
            self.engine.step()
        return Step(torch.tensor(float("nan")), skipped=True)

    def masters(self) -> list[torch.Tensor]:
        return self.tensors.masters()

    def stepping(self) -> torch.optim.Optimizer:
        return self.tensors.inner

    def _places_of_updates(self) -> Iterator[tuple[torch.Tensor, list[Place]]]:
        return self.tensors.places(self.parameters)

    def held(self, key: str) -> list[torch.Tensor | None]:
        return self.tensors.held(key)

    def refresh(self) -> None:
        self.tensors.refresh(self.parameters.values())

    @property
    def loss_scale(self) -> float:
        scaler = getattr(self.optimizer, "loss_scaler", None)
        return float(scaler.cur_scale) if scaler is not None and self.resolved.precision.loss_scaling else 1.0

    def evidence(self) -> list[Claim]:
        settings: ZeroSettings = self.resolved.settings
        world, ranks = self.resolved.world_size, self.resolved.state_ranks
        stage = int(self.engine.zero_optimization_stage())
        masters = self.tensors.masters()
        local, whole = (
            sum(flat.numel() for flat in masters),
            sum(math.prod(shape) for shape in self.parts.values()),
        )
        # Stages 1 and 2 pad a group's partition to DeepSpeed's alignment, 2 x ranks elements; stage 3 pads each
        # parameter to a multiple of the ranks.
        slack = len(self.parameters) if settings.stage == 3 else 2 * ranks * len(masters)
        ok = 0 < local <= -(-whole // ranks) + slack
        claims = [
            connected_claim(world, self.device),
            Claim(
                "engine",
                "engine",
                "DeepSpeedEngine",
                type(self.engine).__name__,
                hasattr(self.engine, "zero_optimization"),
            ),
            Claim("zero-stage", "ZeRO stage", str(settings.stage), str(stage), stage == settings.stage),
            Claim(
                "share-of-state",
                "optimizer state held by this process",
                f"{100 / ranks:.1f} %",
                f"{100 * local / max(1, whole):.1f} %",
                ok,
            ),
        ]
        if settings.stage == 3:
            split = [p for p in self.engine.module.parameters() if hasattr(p, "ds_tensor")]
            total = len(list(self.engine.module.parameters()))
            claims.append(Claim("weights-split", "parameters split", str(total), str(len(split)), len(split) == total))
            claims += self._second_copies(split)
            buffers = self.engine.module.named_buffers()
            kept = {name: tensor.numel() for name, tensor in buffers if name in self.kept_whole}
            claims += whole_claims(self.resolved, self.kept_whole, kept)
        return claims

    def _second_copies(self, split: list[Any]) -> list[Claim]:
        """hpZ: before the first step every weight has a second copy, divided between the ranks of a group."""
        copies = [p.ds_secondary_tensor for p in split if getattr(p, "ds_secondary_tensor", None) is not None]
        if not self.resolved.mesh.hybrid:
            return []
        sizes = {(p.ds_secondary_tensor_num_of_groups, p.ds_secondary_tensor_group_size) for p in split}
        (groups, group), *others = sorted(sizes)
        axes = (groups, group) if not others else (0, 0)
        whole = Claim(
            "mesh", "weights with a second copy", str(len(split)), str(len(copies)), len(copies) == len(split) > 0
        )
        return [whole, *self._mesh_claims([(axes, copy) for copy in copies])]

    def full_weight(self, name: str, main_only: bool = False) -> torch.Tensor:
        return self.tensors.weight(self.parameters[name], self._reads(main_only))

    def full_gradient(self, name: str) -> torch.Tensor | None:
        grad = self.tensors.gradient(self.parameters[name])
        return None if grad is None else grad.float() / self.loss_scale

    def full_state(self, name: str, scales: bool = False, main_only: bool = False) -> OptimizerState | None:
        reads = self._reads(main_only)
        moments = {key: self.tensors.moment(self.parameters[name], key, reads) for key in self.moment_keys(name)}
        if not moments or any(moment is None for moment in moments.values()):
            return None
        return OptimizerState(self.tensors.step_count(), {k: m for k, m in moments.items() if m is not None})

    def load(self, name: str, weight: torch.Tensor, state: OptimizerState | None) -> None:
        parameter = self.parameters[name]
        self.tensors.set_weight(parameter, weight)
        if state is not None:
            self.tensors.make_state(self.moment_keys(name), counts=self.counts_steps(name))
            for key, moment in state.moments.items():
                self.tensors.set_moment(parameter, key, moment)
            self.tensors.set_step_count(state.step)

    def own_weight(self, name: str) -> Values:
        return self.tensors.own(self.parameters[name])

    def own_gradient(self, name: str) -> Values:
        return [
            (piece, part.float() / self.loss_scale) for piece, part in self.tensors.own_gradient(self.parameters[name])
        ]

    def pieces(self, name: str) -> Owned:
        parameter, keys = self.parameters[name], self.moment_keys(name)
        moments = self.tensors.own_moments(parameter, keys)
        return Owned(
            self.tensors.own(parameter),
            moments or {},
            dict.fromkeys(moments or {}, self.parts[name]),
            self.tensors.step_count() if keys and moments is not None else None,
        )

    def load_pieces(self, name: str, saved: Saved) -> None:
        parameter, keys = self.parameters[name], self.moment_keys(name)
        self.tensors.load_weight(parameter, saved.weight)
        if saved.step is not None:
            self.tensors.make_state(keys, counts=self.counts_steps(name))
            for key in keys:
                self.tensors.load_moment(parameter, key, saved.moment)
            self.tensors.set_step_count(saved.step)

    @contextlib.contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        if self.resolved.settings.stage < 3:
            yield self.engine.module
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(self.engine.module.parameters())):
            yield self.engine.module

    def extra_state(self) -> dict[str, Any]:
        if not self.resolved.precision.loss_scaling:
            return {}
        scaler = self.engine.optimizer.loss_scaler
        return {"scaler": {"cur_scale": scaler.cur_scale, "cur_iter": scaler.cur_iter,
                           "last_overflow_iter": scaler.last_overflow_iter}}  # fmt: skip

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        for key, value in state.get("scaler", {}).items():
            setattr(self.engine.optimizer.loss_scaler, key, value)


def _reached_apart(loss: torch.Tensor, parameters: Mapping[str, nn.Parameter], device: torch.device) -> list[str]:
    """Names of those that the losses of some ranks depend on, and those of others do not. Every rank calls it."""
    reached = leaves_of(loss)
    counts = torch.tensor([id(p) in reached for p in parameters.values()], dtype=torch.int32, device=device)
    dist.all_reduce(counts)
    ranks = dist.get_world_size()
    return [name for name, count in zip(parameters, counts.tolist(), strict=True) if 0 < count < ranks]


def _split(model: nn.Module, resolved: Resolved, device: torch.device) -> None:
    """Split every parameter over the ranks, one after another, in the dtype that the engine would give it. Of one that
    is loaded by part, each rank reads its own.

    By default DeepSpeed 0.19.8 moves the whole model to each device before it splits it there
    (``engine._configure_distributed_model``): a model that only fits in shares would never start.
    """
    import deepspeed

    dtype = getattr(torch, resolved.precision.compute)
    packed = packed_weights(model)
    for parameter in model.parameters():
        if parameter.is_floating_point() and id(parameter) not in packed:
            parameter.data = parameter.data.to(dtype)

    def one_by_one(recurse: bool = True) -> Iterator[nn.Parameter]:
        """Given to DeepSpeed, which has split one when it asks for the next: no more than one is ever whole."""
        for parameter in list(parameters(recurse)):
            source = source_of(parameter)
            if source is not None:
                set_values(parameter, torch.empty_like(parameter, device=device))
            yield parameter
            if source is not None:
                fill_partition(parameter, source)

    parameters, config = model.parameters, strategy_of(resolved).deepspeed_config(resolved)
    with mock.patch.object(model, "parameters", one_by_one):
        deepspeed.zero.Init(module=model, config_dict_or_path=config, dtype=dtype)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)


def _as_buffers(model: nn.Module, whole: Mapping[str, nn.Parameter]) -> None:
    """Have modules hold these frozen weights as buffers, by the same names: stage 3 shards every parameter of a model,
    those that it leaves whole have to be below one size, and it frees the others after each step (DeepSpeed 0.19.8,
    runtime/zero/parameter_offload.py, ``partition_all_parameters``)."""
    mine = {id(parameter) for parameter in whole.values()}
    for module in model.modules():
        for key, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) in mine:
                delattr(module, key)
                module.register_buffer(key, parameter.detach())


def _round_once() -> None:
    """ZeRO-3's own linear (DeepSpeed 0.19.8, runtime/zero/linear.py) rounds a product to 16 bits and then adds the bias
    to it in place; torch's adds first and rounds once. Where products are kept by selective checkpointing the change in
    place is wrong as well, see ``toolkit/model/checkpointing.py``."""
    from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.ops.aten.linear(x, weight, bias)  # what nn.functional.linear is while nobody replaces it

    LinearFunctionForZeroStage3.forward = staticmethod(linear)


def _read(source: Source, dtype: torch.dtype, piece: Piece) -> torch.Tensor:
    values = torch.empty(piece.numel, dtype=dtype)
    fill(values, source, piece.start[0])
    return values


@contextlib.contextmanager
def _overflowing(zero: Any) -> Iterator[None]:
    """Have DeepSpeed's optimizer find an overflow, whatever the gradients are."""

    def found(*args: Any, **kwargs: Any) -> bool:
        zero.overflow = True
        return True

    def dropped(*args: Any, **kwargs: Any) -> None:
        found()
        upstream.set_norm(zero, float("inf"))
        zero.clear_hp_grads()
        zero.clear_lp_grads()

    changed = upstream.overflowing(zero, found, dropped)
    before = {key: zero.__dict__[key] for key in changed if key in zero.__dict__}
    vars(zero).update(changed)
    try:
        yield
    finally:
        for key in changed:
            vars(zero).pop(key)
        vars(zero).update(before)


def _lossy_copies(parameters: Mapping[str, nn.Parameter], compute: str) -> dict[str, torch.Tensor]:
    """Float32 weights that 16 bits cannot hold. DeepSpeed 0.19.8 makes its float32 masters from the 16-bit copy,
    so training would start from rounded weights; they are set again after."""
    dtype = getattr(torch, compute)
    return {
        name: p.detach().clone()
        for name, p in parameters.items()
        if not p.is_meta and not torch.equal(p.detach().to(dtype).to(p.dtype), p)
    }
