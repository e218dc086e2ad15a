"""An engine: a model prepared for training by one strategy, its optimizer, and access to its whole tensors.

The loop calls ``forward``, ``backward``, ``step``. `verify` reads and writes whole tensors by name, however they are
sharded; checkpoints the pieces that each rank owns. This module has the parts that all engines share.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from toolkit.machine import give_back_memory
from toolkit.model.running_statistics import running_layers, statistics
from toolkit.optim.adamw import step_count
from toolkit.optim.adamw8bit import local
from toolkit.optim.groups import make_optimizer
from toolkit.optim.placed import Place, PlacedOptimizer
from toolkit.optimizers import optimizer_kind
from toolkit.strategies.engines.claims import Claim
from toolkit.strategies.engines.link import Pipeline
from toolkit.strategies.engines.pieces import Owned, Piece, Saved, Shape, Values, span, whole
from toolkit.strategies.engines.prepared import Prepared

if TYPE_CHECKING:
    from accelerate import Accelerator

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's moments, for traces of other tools."""


@dataclass(frozen=True)
class Step:
    """The result of one optimizer step. ``grad_norm``: 2-norm of the whole gradient before clipping, on the device."""

    grad_norm: torch.Tensor
    skipped: bool = False


@dataclass
class OptimizerState:
    """The optimizer's state of one parameter, whole, float32 unless the recipe is bf16-pure, on the CPU.

    ``step``: 0 for optimizers that do not count steps. ``moments``: tensors by the optimizer's own names.
    """

    step: int
    moments: dict[str, torch.Tensor]
    scales: dict[str, torch.Tensor] | None = None
    """With 8-bit moments, if requested: the scale of each element."""


class Engine:
    """Base class of the engines. A constructor sets ``model``, ``optimizer`` and ``parameters``."""

    model: nn.Module
    """The model that the loop calls; the strategy's wrapper, if there is one."""
    optimizer: torch.optim.Optimizer
    parameters: dict[str, nn.Parameter]
    """Trainable parameters by their name in the unwrapped model; possibly shards."""
    gradient_divisor: int
    """The strategy divides gradients by this when it sums them over ranks; the loss is multiplied by it."""
    pipeline: Pipeline | None = None
    """This rank's stage and its neighbours; None where it has all of the model's blocks."""
    skip_not_finite = False
    """Whether a step with a non-finite gradient is skipped; checking this synchronises the device."""

    def __init__(self, prepared: Prepared, accelerator: Accelerator) -> None:
        self.resolved = prepared.resolved
        self.accelerator = accelerator
        self.device: torch.device = accelerator.device
        self.parts: dict[str, Shape] = {name: tuple(p.shape) for name, p in prepared.trainable().items()}
        """Shapes of what the ranks that sum gradients with this one have of each trained weight."""
        self.shapes = dict(self.parts)
        """Shapes of the trained weights."""
        ends = itertools.accumulate(math.prod(shape) for shape in self.shapes.values())
        self._ends = dict(zip(self.shapes, ends, strict=True))
        self.dtypes = {name: p.dtype for name, p in prepared.model.named_parameters()}
        self.blocks = prepared.blocks
        self.config = prepared.model.config
        self.matrices = prepared.matrices
        self.running = running_layers(prepared.model)
        self.gradient_divisor = self.resolved.token_parts
        mesh = self.resolved.mesh
        self.place = mesh.place(accelerator.process_index)
        self.peer = mesh.state_peers(accelerator.process_index).index(accelerator.process_index)
        self.scaler = self._make_scaler() if self.resolved.precision.loss_scaling else None
        self.engage(prepared)
        stepping = self.stepping()
        if isinstance(stepping, PlacedOptimizer):
            for tensor, places in self._places_of_updates():
                stepping.locate(tensor, places)
        give_back_memory()  # of whole weights and of copies that engines make while they shard

    # ------------------------------------------------------------------ what the loop calls

    def engage(self, prepared: Prepared) -> None:
        """Wrap the model, move it to the device, and create the optimizer."""
        raise NotImplementedError

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The context of every forward; strategies that cast the weights themselves need none."""
        return contextlib.nullcontext()

    def accumulating(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """The context of a micro-batch's forward and backward; ``last`` is the window's last."""
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Accumulate the gradient of ``loss`` in the window's gradient."""
        (self.scaler.scale(loss) if self.scaler else loss).backward()

    def unscale(self) -> None:
        """Complete and unscale the gradients, after the last micro-batch of a window."""
        self.complete_gradients()
        if self.scaler:
            self.scaler.unscale_(self.optimizer)

    def complete_gradients(self) -> None:
        """Sum over ranks what the backwards of a window have not summed."""

    def _fill_missing(self) -> None:
        """A trained weight that no row of a step reaches has a gradient of zeros, under every strategy and in the plain
        loop: it decays, as in a loop with ``zero_grad(set_to_none=False)``. DeepSpeed and FSDP1 know no other way."""
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def step(self, lr: float) -> Step:
        """Clip, update, and clear the gradients."""
        self.set_lr(lr)
        norm = self.clip(self.resolved.max_grad_norm)
        skipped = False
        if self.skip_not_finite and not self.scaler and not torch.isfinite(norm):
            return self.skip()
        if self.scaler:
            # As factors on the device, so that the host waits once, when all of the step is queued: the next learning
            # rate depends on whether this step counts.
            one = torch.ones((), device=self.device)
            before = self.scaler.scale(one)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            skipped = bool(self.scaler.scale(one) < before)
        else:
            self.optimizer.step()
        self.clear_gradients()
        return Step(norm, skipped)

    def skip(self) -> Step:
        """Clear the gradients of a window without a step; every rank calls it."""
        if self.scaler:
            self.scaler.update()
        self.clear_gradients()
        return Step(torch.tensor(float("nan")), skipped=True)

    def clear_gradients(self) -> None:
        """Free the gradients of a window."""
        self.optimizer.zero_grad(set_to_none=True)

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients down to ``max_norm`` where they exceed it (0: never); returns the norm before."""
        grads = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        self.scale_down(max_norm, norm)
        return norm

    def scale_down(self, max_norm: float, norm: torch.Tensor) -> None:
        """Scale the gradients, whose norm is ``norm``, down to ``max_norm`` where they exceed it (0: never)."""
        if max_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(list(self.parameters.values()), max_norm, norm)

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every group, a multiple of ``lr``, that of parameters which no group of the recipe
        matches; schedules are functions of the step, never objects with state."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_factor", 1.0)

    def group_rates(self) -> list[float]:
        """The learning rate of each of the recipe's groups of parameters, as the optimizer has it now."""
        found = {group["group"]: float(group["lr"]) for group in self.optimizer.param_groups
                 if group.get("group") is not None}  # fmt: skip
        return [found[number] for number in sorted(found)]

    @property
    def loss_scale(self) -> float:
        """The factor that the loss is multiplied by under fp16; 1 elsewhere."""
        return self.scaler.get_scale() if self.scaler else 1.0

    def stepping(self) -> torch.optim.Optimizer:
        """The optimizer that takes the step, which the strategy may have wrapped."""
        return self.optimizer

    def _places_of_updates(self) -> Iterator[tuple[torch.Tensor, list[Place]]]:
        """Each tensor that this rank's optimizer updates, and which elements of which weights it has."""
        for name, parameter in self.parameters.items():
            yield parameter, [Place(name, 0, 0, parameter.numel())]

    def masters(self) -> list[torch.Tensor]:
        """The weights that this rank updates, as its optimizer holds them: float32 unless the recipe is bf16-pure. To
        be asked for each time: FSDP1 makes new views of its shards."""
        return [p.to_local() if hasattr(p, "to_local") else p.data for p in self.parameters.values()]

    # ------------------------------------------------------------------ evaluation at other weights than training

    def held(self, key: str) -> list[torch.Tensor | None]:
        """This rank's parts of one tensor of the optimizer's state, in the order of ``masters``; None where it has no
        state yet."""
        states = (self.optimizer.state.get(parameter) or {} for parameter in self.parameters.values())
        return [local(state[key]) if key in state else None for state in states]

    def release(self) -> None:
        """Free the weights that forwards gathered and kept, so that the next forward gathers them again and ``masters``
        are the shards. Every rank calls it; strategies that keep none do nothing."""

    def refresh(self) -> None:
        """Make what forwards compute with from the masters, which were changed; every rank calls it."""
        self.release()

    # ------------------------------------------------------------------ evidence that the strategy is active

    def evidence(self) -> list[Claim]:
        """The evidence that the strategy is active; every rank calls it."""
        raise NotImplementedError

    # ------------------------------------------------------------------ whole tensors, by name; every rank calls
    #
    # ``main_only``: only rank 0 has use for the values, as when `verify` records them. The other ranks take part in
    # the collectives and copy nothing to the host; they return tensors of the same shape and dtype without memory (on
    # the meta device).

    def full_weight(self, name: str, main_only: bool = False) -> torch.Tensor:
        """The whole trained weight, from the master copy if there is one; on the CPU."""
        raise NotImplementedError

    def full_gradient(self, name: str) -> torch.Tensor | None:
        """The whole gradient of the window, averaged over ranks, before clipping; None if there is none."""
        raise NotImplementedError

    def full_state(self, name: str, scales: bool = False, main_only: bool = False) -> OptimizerState | None:
        """The optimizer's whole state of the parameter; None before its first update, or if it has none.

        ``scales``: instead of moments that are kept in 8 bits, the scale of each element.
        """
        raise NotImplementedError

    def load(self, name: str, weight: torch.Tensor, state: OptimizerState | None) -> None:
        """Set the whole weight, and the optimizer's state unless None."""
        raise NotImplementedError

    # ------------------------------------------------------------------ this rank's pieces, by name; every rank calls

    def own_weight(self, name: str) -> Values:
        """What this rank owns of the trained weight, of the master copy if there is one."""
        return self._on_main(self.full_weight(name, main_only=True))

    def own_gradient(self, name: str) -> Values:
        """What this rank owns of the window's gradient, complete and not clipped; nothing if there is none."""
        gradient = self.full_gradient(name)
        return [] if gradient is None else self._on_main(gradient)

    def _on_main(self, tensor: torch.Tensor) -> Values:
        return [(whole(tuple(tensor.shape)), tensor)] if self.accelerator.is_main_process else []

    def pieces(self, name: str) -> Owned:
        """What this rank owns of the trained weight (of the master copy if there is one) and of its moments.

        Each element is owned by one rank: ranks that hold copies divide them. Values are views where the strategy keeps
        the tensors itself, on the device that they are kept on. An engine that only has whole tensors leaves this as it
        is: rank 0 owns them.
        """
        weight, state = self.full_weight(name, main_only=True), self.full_state(name, main_only=True)
        moments = {} if state is None else state.moments
        if not self.accelerator.is_main_process:
            return Owned([], {}, {}, None)
        return Owned(
            [(whole(tuple(weight.shape)), weight)],
            {key: [(whole(tuple(moment.shape)), moment)] for key, moment in moments.items()},
            {key: tuple(moment.shape) for key, moment in moments.items()},
            None if state is None else state.step,
        )

    def load_pieces(self, name: str, saved: Saved) -> None:
        """Set what this rank holds of the weight, and of the optimizer's state where it was saved, reading no more."""
        state = None
        if saved.step is not None:
            state = OptimizerState(saved.step, {key: saved.moment(key, None) for key in self.moment_keys(name)})
        self.load(name, saved.weight(None), state)

    def _writes(self, name: str) -> bool:
        """Whether this rank owns its part of a tensor, of those that hold the same part: groups of ranks take turns, so
        that each writes as many elements of a checkpoint."""
        mesh = self.resolved.mesh
        turn = (self._ends[name] - 1) * mesh.replicate // max(1, max(self._ends.values()))
        return turn == mesh.replica(self.accelerator.process_index)

    def _mesh_claims(self, parts: Sequence[tuple[tuple[int, int], torch.Tensor]]) -> list[Claim]:
        """Evidence for `strategy.mesh`: of each weight how many ranks hold this part and how many parts there are, and
        this rank's part; and that copies are equal. Every rank calls it."""
        mesh = self.resolved.mesh
        if self.resolved.recipe.strategy.mesh is None:
            return []
        seen = sorted({found for found, _ in parts})
        observed = ", ".join(f"{copies} x {count}" for copies, count in seen) or "none"
        right = f"{mesh.replicate} x {mesh.shard}"
        return [
            Claim("mesh", "copies x parts of each weight", right, observed, seen == [(mesh.replicate, mesh.shard)]),
            *self._copy_claims([part for _, part in parts]),
        ]

    def _copy_claims(self, parts: Sequence[torch.Tensor]) -> list[Claim]:
        """Evidence that copies of weights are equal, by the sum of their bytes. Every rank calls it."""
        import torch.distributed as dist

        mesh = self.resolved.mesh
        rows = mesh.pipeline * mesh.columns
        sums = torch.zeros(rows, mesh.replicate, mesh.shard, dtype=torch.int64, device=self.device)
        flat = [part.reshape(-1).view(torch.uint8).sum(dtype=torch.int64) for part in parts if part.numel()]
        rank = self.accelerator.process_index
        row = mesh.stage(rank) * mesh.columns + mesh.column(rank)
        sums[row, mesh.replica(rank), self.place] = sum(one.to(self.device) for one in flat)
        dist.all_reduce(sums)
        same = int((sums == sums[:, :1]).all(1).all(0).sum().item())
        return [Claim("mesh-copies", "parts whose copies are equal", str(mesh.shard), str(same), same == mesh.shard)]

    def _share(self, name: str) -> Piece:
        """This rank's part of a tensor that it and its peers hold. They divide all trained elements, in the model's
        order, into equal ranges, so that few tensors are cut."""
        mesh = self.resolved.mesh
        rank, world = self.peer, mesh.stage_size // mesh.columns
        total, size = max(self._ends.values()), math.prod(self.parts[name])
        before = self._ends[name] - size
        first, last = total * rank // world - before, total * (rank + 1) // world - before
        return span(min(max(first, 0), size), min(max(last, 0), size))

    def _divided(self, name: str, tensor: torch.Tensor) -> Values:
        """This rank's part of a tensor that every rank holds, a view of it if it is contiguous. A moment of another
        shape than the weight's belongs to the rank that has the weight's first element."""
        piece = self._share(name)
        flat = tensor.detach().reshape(-1)
        if tuple(tensor.shape) != self.parts[name]:
            piece = span(0, flat.numel() if piece.start[0] == 0 and piece.numel else 0)
        return owned(piece, flat[piece.start[0] : piece.start[0] + piece.numel])

    def statistics(self) -> dict[str, torch.Tensor]:
        """Running statistics by name, on the CPU; those of this rank."""
        return {name: on_host(value) for name, value in statistics(self.running).items()}

    def load_statistics(self, read: Callable[[str], torch.Tensor]) -> None:
        """Set every running statistic to what ``read`` gives for its name."""
        for name, value in statistics(self.running).items():
            value.copy_(read(name))

    @contextlib.contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """The unwrapped model able to run a forward outside training (generation, logits)."""
        yield self.accelerator.unwrap_model(self.model)

    def extra_state(self) -> dict[str, Any]:
        """JSON-able state beyond the tensors: the loss scaler's."""
        return {"scaler": self.scaler.state_dict()} if self.scaler else {}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of ``extra_state``."""
        if self.scaler and "scaler" in state:
            self.scaler.load_state_dict(dict(state["scaler"]))

    def moment_keys(self, name: str) -> tuple[str, ...]:
        """Names of the tensors in the optimizer's state of the parameter."""
        optimizer = self.resolved.recipe.optimizer
        return optimizer_kind(optimizer.name).tensors(optimizer, self.shapes[name], name in self.matrices)

    def counts_steps(self, name: str) -> bool:
        """Whether the optimizer's state of the parameter has a count of steps."""
        return optimizer_kind(self.resolved.recipe.optimizer.name).counts(name in self.matrices)

    # ------------------------------------------------------------------ shared by subclasses

    def _reads(self, main_only: bool) -> bool:
        """Whether this rank needs the values of a whole tensor."""
        return not main_only or self.accelerator.is_main_process

    def _make_optimizer(self, parameters: Mapping[str, nn.Parameter], decayed: frozenset[str]) -> torch.optim.Optimizer:
        return self._optimizer_over(parameters, decayed, fused=True)

    def _optimizer_over(
        self, parameters: Mapping[str, nn.Parameter], decayed: frozenset[str], *, fused: bool
    ) -> torch.optim.Optimizer:
        recipe = self.resolved.recipe
        warmup = recipe.schedule.warmup_steps or 0
        return make_optimizer(parameters, decayed, self.matrices, recipe.optimizer, fused=fused, warmup=warmup)

    def _started(self, name: str, parameter: torch.Tensor, state: OptimizerState) -> dict[str, Any]:
        """The count of steps for a loaded state, if the optimizer counts them."""
        return {"step": step_count(self.optimizer, parameter, state.step)} if self.counts_steps(name) else {}

    def _make_scaler(self) -> Any:
        return torch.amp.GradScaler(self.device.type, init_scale=self._initial_scale())

    def _initial_scale(self) -> float:
        """torch's 65536 over the ranks: the loss of each rank is multiplied by their number already, so every
        number of ranks starts with the same scale on the same gradients."""
        return 65536.0 / self.gradient_divisor


def on_host(tensor: torch.Tensor, values: bool = True) -> torch.Tensor:
    """A copy of ``tensor`` on the CPU; without ``values`` its shape and dtype alone, on the meta device."""
    tensor = tensor.detach()
    return tensor.to("cpu", copy=True) if values else torch.empty_like(tensor, device="meta")


def owned(piece: Piece, values: torch.Tensor) -> Values:
    """One piece, or none where it is empty."""
    return [(piece, values)] if piece.numel else []


def counted_steps(state: Mapping[str, Any]) -> int:
    """The count of steps in an optimizer's state of one parameter; 0 if it has none."""
    return int(state["step"].item()) if "step" in state else 0
