"""Layers whose matrices are divided over ranks: tensor parallelism (Shoeybi et al., arXiv:1909.08053).

Each rank has some columns of the first matrices of a block's two halves (heads of attention, the feed-forward layer's
inner units) and the rows of the second ones that take them. The model's own ``base_model_tp_plan`` says which are
which. Hidden states between them are whole on every rank: where they enter, their gradients are added up over the
ranks, and where they leave, they are. Weights stay plain tensors, so that what shards or averages them needs to know
nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from toolkit.errors import InputError, RunFailed
from toolkit.model.sources import Made, Source, give, source_of
from toolkit.recipe.resolve import Resolved

ACTIVATIONS = ("act_fn", "act", "activation_fn")
"""What transformers' models call the function between the matrices of a feed-forward layer. Few have weights of their
own (xIELU), and no plan names them."""
COLUMNS, ROWS, SHARED = "colwise", "rowwise", "replicated_with_grad_allreduce"
"""transformers' names: a matrix whose outputs are divided, one whose inputs are, and a weight that every rank has and
applies to its own part alone."""


@dataclass(frozen=True)
class Division:
    """How a weight is divided: into ``count`` equal parts along ``dim``, of which this rank has number ``index``.

    ``runs``: the dimension consists of so many equal runs of elements, of each of which a rank has its part.
    """

    dim: int
    index: int
    count: int
    runs: int = 1

    def whole(self, own: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the whole weight, of which a part has the shape ``own``."""
        return (*own[: self.dim], own[self.dim] * self.count, *own[self.dim + 1 :])

    def part(self, tensor: torch.Tensor, index: int | None = None) -> torch.Tensor:
        """This rank's part of a whole tensor, or another's: a view, where the dimension is one run."""
        own = tensor.shape[self.dim] // (self.count * self.runs)
        first = (self.index if index is None else index) * own
        if self.runs == 1:
            return tensor.narrow(self.dim, first, own)
        apart = tensor.unflatten(self.dim, (self.runs, -1))
        return apart.narrow(self.dim + 1, first, own).flatten(self.dim, self.dim + 1)

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole tensor of the parts of all ranks, in their order."""
        if self.runs == 1:
            return torch.cat(list(parts), self.dim)
        apart = [part.unflatten(self.dim, (self.runs, -1)) for part in parts]
        return torch.cat(apart, self.dim + 1).flatten(self.dim, self.dim + 1)

    def folded(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """A tensor of this shape, whole or a part, with the same elements in the same order, as rows that are divided:
        their number, their length, and how many elements each of these has."""
        rows = math.prod(shape[: self.dim]) * self.runs
        return rows, shape[self.dim] // self.runs, math.prod(shape[self.dim + 1 :])


@dataclass(frozen=True)
class Ranks:
    """The ranks that divide layers with this one, and its place among them. ``add_up``: sums a tensor over them in
    place. ``gather``: the tensors of one shape that they have, in their order."""

    count: int
    index: int
    add_up: Callable[[torch.Tensor], None]
    gather: Callable[[torch.Tensor], list[torch.Tensor]]


_GROUPS: dict[tuple[str, tuple[int, ...]], tuple[Any, dist.ProcessGroup]] = {}
"""Groups of this process by what they are for and their ranks, with the group of all that each was made in: once for
each."""


def layer_group(resolved: Resolved) -> dist.ProcessGroup:
    """Of the ranks that divide layers with this one. Every process calls it."""
    return group_of(resolved, resolved.mesh.layer_ranks)


def state_group(resolved: Resolved) -> dist.ProcessGroup:
    """Of the ranks that hold the same part of every layer as this one. Every process calls it."""
    return group_of(resolved, resolved.mesh.state_peers)


def group_of(resolved: Resolved, of: Callable[[int], list[int]], use: str = "") -> dist.ProcessGroup:
    """The group of this process among those that ``of`` gives for all ranks. ``use``: what needs a group of its own.
    Every process calls it."""
    world: Any = dist.group.WORLD
    wanted = sorted({tuple(of(rank)) for rank in range(resolved.world_size)})
    own = tuple(of(dist.get_rank()))
    if (use, own) not in _GROUPS or _GROUPS[use, own][0] is not world:
        for ranks in wanted:
            made = dist.new_group(list(ranks))
            if ranks == own:
                _GROUPS[use, own] = world, made
    return _GROUPS[use, own][1]


def own_ranks(resolved: Resolved) -> Ranks:
    """The group that divides layers with this process. Every process calls it."""
    group = layer_group(resolved)

    def add_up(tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor, group=group)

    def gather(tensor: torch.Tensor) -> list[torch.Tensor]:
        found = [torch.empty_like(tensor) for _ in range(resolved.mesh.columns)]
        dist.all_gather(found, tensor, group=group)
        return found

    return Ranks(resolved.mesh.columns, resolved.mesh.column(dist.get_rank()), add_up, gather)


def split_layers(model: nn.Module, ranks: Ranks, source: str) -> dict[str, Division]:
    """Leave this rank's part in every matrix that the model's plan divides, of adapters beside them too; returns how
    each weight is divided, by name.

    Call it when adapters are there; values may be missing (``sources.py``). Raises InputError for a layer that cannot
    be divided, or a plan that divides none.
    """
    plan = _plan(model)
    base, prefix = transformers_base(model)
    divisions: dict[str, Division] = {}
    found = False
    for name, module in list(base.named_modules()):
        how = matching(plan, name)
        if how is None:
            continue
        found = True
        try:
            _split(module, how, ranks, f"{prefix}{name}", divisions)
        except ValueError as problem:
            raise InputError(f"{source}: strategy.mesh.tensor: {prefix}{name}: {problem}") from None
    for name in _between(base, plan):
        if name.rpartition(".")[2] not in ACTIVATIONS:
            raise InputError(
                f"{source}: strategy.mesh.tensor: {prefix}{name} has weights between layers that ranks divide, of "
                f"which {type(model).__name__}'s plan says nothing"
            )
        _sum_gradients(base.get_submodule(name), ranks)
    if not found:
        raise InputError(f"{source}: strategy.mesh.tensor: {type(model).__name__} has no plan that divides its layers")
    return divisions


def _between(base: nn.Module, plan: Mapping[str, str]) -> list[str]:
    """Modules with weights of their own, which the plan does not name, in one whose layers are divided both ways: what
    they are applied to is a part."""
    found = []
    for parent, module in base.named_modules():
        path = f"{parent}." if parent else ""
        named = {child: matching(plan, f"{path}{child}") for child, _ in module.named_children()}
        if not {COLUMNS, ROWS} <= set(named.values()):
            continue
        planned = [f"{path}{child}" for child, how in named.items() if how is not None]
        for name, part in module.named_modules(prefix=parent):
            divided = any(name == own or name.startswith(f"{own}.") for own in planned)
            if not divided and any(True for _ in part.parameters(recurse=False)):
                found.append(name)
    return found


def _plan(model: Any) -> dict[str, str]:
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model
    return dict(getattr(whole.config, "base_model_tp_plan", None) or {})


def transformers_base(model: Any) -> tuple[nn.Module, str]:
    """The transformers model without its head, whose modules the plan names, and the prefix of their names."""
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model
    inner = getattr(whole, whole.base_model_prefix, whole)
    prefix = next(name for name, module in model.named_modules() if module is inner)
    return inner, f"{prefix}." if prefix else ""


def matching(plan: Mapping[str, str], name: str) -> str | None:
    """What a plan of transformers says of a module or weight; None if it says nothing. Its ``*`` stand for numbers."""
    for pattern, how in plan.items():
        if re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name):
            return how
    return None


def _split(module: nn.Module, how: str, ranks: Ranks, name: str, divisions: dict[str, Division]) -> None:
    """Divide one layer. Raises ValueError with what is wrong."""
    if how == SHARED:
        _sum_gradients(module, ranks)
        return
    if how not in (COLUMNS, ROWS):
        raise ValueError(f"its plan is {how}, which is not supported")
    base = getattr(module, "base_layer", None)
    if base is None:
        _split_linear(module, how, ranks, name, divisions)
        return
    _split_linear(base, how, ranks, f"{name}.base_layer", divisions)
    parts = {"lora_A": how if how == ROWS else None, "lora_B": how if how == COLUMNS else None}
    for side, own in parts.items():
        for adapter, matrix in getattr(module, side).items():
            if own is not None:
                _split_linear(matrix, own, ranks, f"{name}.{side}.{adapter}", divisions)
    if how == ROWS:
        for dropout in getattr(module, "lora_dropout", {}).values():
            if isinstance(dropout, nn.Dropout):
                dropout.forward = MethodType(_dropped_part(ranks), dropout)  # type: ignore[method-assign]


def _split_linear(module: nn.Module, how: str, ranks: Ranks, name: str, divisions: dict[str, Division]) -> None:
    if type(module) is not nn.Linear:
        raise ValueError(f"{type(module).__name__} is not a linear layer")
    dim = 0 if how == COLUMNS else 1
    division = Division(dim, ranks.index, ranks.count)
    if module.weight.shape[dim] % ranks.count:
        raise ValueError(f"{ranks.count} ranks cannot divide {module.weight.shape[dim]}")
    module.weight = divided_part(module.weight, division)
    divisions[f"{name}.weight"] = division
    if how == COLUMNS:
        module.out_features //= ranks.count
        if module.bias is not None:
            module.bias = divided_part(module.bias, division)
            divisions[f"{name}.bias"] = division
        module.forward = MethodType(_columns(ranks), module)  # type: ignore[method-assign]
    else:
        module.in_features //= ranks.count
        module.forward = MethodType(_rows(ranks), module)  # type: ignore[method-assign]


def divided_part(parameter: torch.Tensor, division: Division) -> nn.Parameter:
    """This rank's part of a parameter, with memory of its own; without values, with a source of its own."""
    part = division.part(parameter.detach())
    made = nn.Parameter(part.clone(memory_format=torch.contiguous_format), requires_grad=parameter.requires_grad)
    if (source := source_of(parameter)) is not None:
        give(made, PartOf(source, tuple(parameter.shape), division))
    return made


@dataclass(frozen=True)
class PartOf:
    """A part of another source's tensor, whose whole shape is ``shape``."""

    source: Source
    shape: tuple[int, ...]
    division: Division

    def fill(self, into: torch.Tensor, start: int) -> None:
        if isinstance(self.source, Made):  # what is made whole each time is made once
            into.copy_(self.whole().reshape(-1)[start : start + into.numel()])
            return
        # Runs of elements that follow each other in both: those of a part of the columns are short, and read together.
        rows, length, inner = self.division.folded(self.shape)
        run, whole = length // self.division.count * inner, length * inner
        if run == whole:
            self.source.fill(into, start)
            return
        offset, at = self.division.index * run, 0
        while at < into.numel():
            outer, within = divmod(start + at, run)
            if within == 0 and rows > 1 and into.numel() - at >= 2 * run:
                some = min((into.numel() - at) // run, max(1, _TOGETHER // whole))
                block = torch.empty(some * whole, dtype=into.dtype)
                self.source.fill(block, outer * whole)
                into[at : at + some * run].copy_(block.view(some, whole)[:, offset : offset + run].reshape(-1))
                at += some * run
                continue
            some = min(run - within, into.numel() - at)
            self.source.fill(into[at : at + some], outer * whole + offset + within)
            at += some

    def whole(self) -> torch.Tensor:
        return self.division.part(self.source.whole().view(self.shape)).contiguous()


_TOGETHER = 2**22
"""Elements of whole rows that are read at a time for a part of their columns."""


class _Entering(torch.autograd.Function):
    """Hidden states as they are; their gradient, of which every rank has a part, is added up."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _added(outer[0], ctx.ranks), None


class _Leaving(torch.autograd.Function):
    """Parts of hidden states, added up; the gradient of each part is that of the sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        return _added(x, ranks)

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor, None]:
        return outer[0], None


class _Gathering(torch.autograd.Function):
    """The columns of all ranks, side by side; each rank's gradient is that of its own, since all compute the same with
    the whole."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        ctx.ranks = ranks
        return torch.cat(ranks.gather(x.contiguous()), dim=-1)

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor, None]:
        return outer[0].chunk(ctx.ranks.count, dim=-1)[ctx.ranks.index].contiguous(), None


def _added(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    ranks.add_up(total)
    return total


def entering(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """``x``, whole on every rank, where each computes a part of what follows."""
    return _Entering.apply(x, ranks)


def leaving(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The sum over the ranks of ``x``, of which each has computed a part."""
    return _Leaving.apply(x, ranks)


def gathered(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The columns of which each rank has computed as many as ``x`` has, whole on every rank."""
    return _Gathering.apply(x, ranks)


def _columns(ranks: Ranks) -> Callable[..., torch.Tensor]:
    def forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(entering(x, ranks), self.weight, self.bias)

    return forward


def _rows(ranks: Ranks) -> Callable[..., torch.Tensor]:
    def forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] != self.in_features:
            raise RunFailed(
                f"strategy.mesh.tensor: a layer that takes {self.in_features} columns was given {x.shape[-1]}: this "
                "model computes its layers otherwise than its plan says"
            )
        total = leaving(functional.linear(x, self.weight), ranks)
        return total if self.bias is None else total + self.bias.to(total.dtype)

    return forward


def _dropped_part(ranks: Ranks) -> Callable[..., torch.Tensor]:
    """Dropout of a part of the columns: this rank's part of the mask that the whole tensor would draw."""

    def forward(self: nn.Dropout, x: torch.Tensor) -> torch.Tensor:
        if not self.training or not self.p:
            return x
        whole = torch.ones((*x.shape[:-1], x.shape[-1] * ranks.count), dtype=x.dtype, device=x.device)
        mask = functional.dropout(whole, self.p)
        return x * mask.narrow(-1, ranks.index * x.shape[-1], x.shape[-1])

    return forward


def _sum_gradients(module: nn.Module, ranks: Ranks) -> None:
    """Have the gradients of a module's own weights added up over the ranks, each of which applies them to its part.

    Inside of its forward the module finds weights whose gradient is added up on its way: a hook on the parameter would
    miss what takes its place (FSDP2 gathers into a tensor of its own).
    """
    own = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        own_weights = dict(module.named_parameters(recurse=False))
        try:
            for key, parameter in own_weights.items():
                object.__setattr__(module, key, entering(parameter, ranks))  # found before the parameter of that name
            return own(*args, **kwargs)
        finally:
            for key in own_weights:
                object.__delattr__(module, key)

    module.forward = forward
