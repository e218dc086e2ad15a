"""Experts divided over ranks: expert parallelism (Lepikhin et al., arXiv:2006.16668).

Each rank has samples of its own, all of the model but its experts, and an equal part of each layer's experts. In every
such layer a token's hidden state goes to the ranks that have its experts, and their results come back to be weighted.
The model's own ``base_model_ep_plan`` (transformers) says which modules hold experts, and their own ``forward``
computes: of the rows that a rank has received, each with one expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from toolkit.errors import InputError
from toolkit.model.tensor import Division, divided_part, group_of, matching, transformers_base
from toolkit.recipe.resolve import Resolved

EXPERTS, WEIGHT = "ep_dispatch_experts", "grouped_gemm"
"""transformers' names (5.23.0): a module of experts, and a weight of it with one entry per expert along its first
dimension."""


@dataclass(frozen=True)
class ExpertRanks:
    """The ranks that divide experts with this one, and its place among them. ``sizes``: of the rank that each row goes
    to, how many rows this one gives to each and takes from each. ``move``: gives rows, and takes others, of so many."""

    count: int
    index: int
    sizes: Callable[[torch.Tensor], tuple[Sequence[int], Sequence[int]]]
    move: Callable[[torch.Tensor, Sequence[int], Sequence[int]], torch.Tensor]


def expert_group(resolved: Resolved) -> dist.ProcessGroup:
    """Of the ranks that divide experts with this one. Every process calls it."""
    return group_of(resolved, resolved.mesh.expert_ranks, "experts")


def divide_experts(model: nn.Module, ranks: ExpertRanks, source: str) -> dict[str, Division]:
    """Leave this rank's part in every module of experts; returns how each weight is divided, by name.

    Call it when adapters are there; values may be missing (``sources.py``). Raises InputError for a model whose plan
    names no experts, or whose experts cannot be divided.
    """
    base, prefix = transformers_base(model)
    adapted: Any = model
    whole = adapted.get_base_model() if hasattr(model, "get_base_model") else adapted
    plan = dict(getattr(whole.config, "base_model_ep_plan", None) or {})
    divisions: dict[str, Division] = {}
    for name, module in list(base.named_modules()):
        if matching(plan, name) != EXPERTS:
            continue
        experts, place = module, name
        try:
            while hasattr(experts, "base_layer"):
                divisions |= _divide_adapter(experts, ranks, f"{prefix}{place}")
                experts, place = experts.base_layer, f"{place}.base_layer"
        except ValueError as problem:
            raise InputError(
                f"{source}: strategy.mesh.expert: {prefix}{name} has an adapter that ranks cannot divide: {problem}; "
                "set adapter.target_modules to linear layers, e.g. [q_proj, v_proj]"
            ) from None
        for own, parameter in list(experts.named_parameters(recurse=False)):
            if matching(plan, f"{name}.{own}") != WEIGHT:
                raise InputError(f"{source}: strategy.mesh.expert: the model's plan does not name {prefix}{name}.{own}")
            if parameter.shape[0] % ranks.count:
                raise InputError(
                    f"{source}: strategy.mesh.expert: {ranks.count} ranks cannot divide {parameter.shape[0]} experts; "
                    f"set a divisor of {parameter.shape[0]}"
                )
            division = Division(0, ranks.index, ranks.count)
            setattr(experts, own, divided_part(parameter, division))
            divisions[f"{prefix}{place}.{own}"] = division
        _take_part(experts, ranks)
    if not divisions:
        raise InputError(f"{source}: strategy.mesh.expert: {type(whole).__name__} has no plan that divides its experts")
    return divisions


def _divide_adapter(layer: Any, ranks: ExpertRanks, name: str) -> dict[str, Division]:
    """Leave this rank's part of the adapters that PEFT has put on one weight of all experts: of A (rank of all experts,
    in) the rows of its experts, of B (out, rank of all experts) for each rank the columns of its experts.

    Raises ValueError where each expert has no adapter of its own.
    """
    if type(layer).__name__ != "ParamWrapper":
        raise ValueError(f"it is a {type(layer).__name__}")
    if layer.num_experts % ranks.count or layer.get_param().dim() != 3:
        raise ValueError(f"{layer.parameter_name} has no matrix for each expert")
    own = layer.num_experts // ranks.count
    divisions: dict[str, Division] = {}
    for adapter, rank in layer.r.items():
        a, b = layer.lora_A[adapter], layer.lora_B[adapter]
        rows, columns = Division(0, ranks.index, ranks.count), _columns(ranks, rank)
        a.weight, b.weight = divided_part(a.weight, rows), divided_part(b.weight, columns)
        a.out_features = b.in_features = rank * own
        divisions |= {f"{name}.lora_A.{adapter}.weight": rows, f"{name}.lora_B.{adapter}.weight": columns}
    layer.get_delta_factors = MethodType(_factors_of(own), layer)
    return divisions


def _columns(ranks: ExpertRanks, rank: int) -> Division:
    """Of B, whose columns are those of all experts for one rank of the adapter after another."""
    return Division(1, ranks.index, ranks.count, runs=rank)


def _factors_of(experts: int) -> Callable[..., Any]:
    """PEFT's factors of a weight's change, of so many experts. Its layer keeps the number of all of them: of
    a single one it (0.21.2) would compute another product, which rounds otherwise, and of another shape where experts
    are transposed."""

    def factors(self: Any, adapter: str) -> Any:
        whole, self.num_experts = self.num_experts, experts
        try:
            return type(self).get_delta_factors(self, adapter)
        finally:
            self.num_experts = whole

    return factors


def _take_part(experts: Any, ranks: ExpertRanks) -> None:
    """Have a module of experts, of which this rank has some, exchange rows with the others."""
    experts.num_experts //= ranks.count
    forward: Callable[..., torch.Tensor] = type(experts).forward
    weights = [own for own, _ in experts.named_parameters(recurse=False)]
    experts.forward = MethodType(_exchanging(forward, ranks, weights), experts)


def _exchanging(
    own: Callable[..., torch.Tensor], ranks: ExpertRanks, weights: Sequence[str]
) -> Callable[..., torch.Tensor]:
    def forward(
        self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """``hidden_states`` (tokens, width), ``top_k_index`` and ``top_k_weights`` (tokens, experts of each)."""
        count = top_k_index.shape[-1]
        experts = top_k_index.reshape(-1)
        owner = experts // self.num_experts
        # By the rank that has the expert; those of a rank in the order of tokens.
        order = torch.argsort(owner, stable=True)
        given, taken = ranks.sizes(owner)
        rows = _Moved.apply(hidden_states[order // count], ranks, given, taken)
        expert = ranks.move((experts % self.num_experts)[order], given, taken)
        found = own(self, rows, expert.unsqueeze(1), torch.ones_like(rows[:, :1]))
        if not len(rows):
            found = _OfNothing.apply(found, rows, *[getattr(self, name) for name in weights])
        back = _Moved.apply(found, ranks, taken, given)
        weighted = back[_places(order)] * top_k_weights.reshape(-1, 1)
        total = weighted.view(*top_k_index.shape, -1).sum(1)
        return total.to(hidden_states.dtype)

    return forward


def _places(order: torch.Tensor) -> torch.Tensor:
    """Where each row is in ``order``."""
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel(), device=order.device)
    return places


class _Moved(torch.autograd.Function):
    """Rows at the ranks that they go to; their gradients come back the same way. Nothing is computed."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, ranks: ExpertRanks, given: Sequence[int], taken: Sequence[int]
    ) -> torch.Tensor:
        ctx.ranks, ctx.back = ranks, (taken, given)
        return ranks.move(rows, given, taken)

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.ranks.move(outer[0], *ctx.back), None, None, None


class _OfNothing(torch.autograd.Function):
    """The result of no rows at all, as a result of them and of the experts' weights: the other ranks wait for this one
    where gradients of rows come back. transformers' eager experts (5.23.0) make it of nothing."""

    @staticmethod
    def forward(ctx: Any, found: torch.Tensor, rows: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.weights = len(weights)
        return found.view_as(found)

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return outer[0], outer[0], *[None] * ctx.weights


def own_expert_ranks(resolved: Resolved) -> ExpertRanks:
    """The group that divides experts with this process. Every process calls it."""
    rank, group, count = dist.get_rank(), expert_group(resolved), resolved.mesh.expert

    def sizes(owner: torch.Tensor) -> tuple[list[int], list[int]]:
        given = torch.bincount(owner, minlength=count)
        taken = torch.empty_like(given)
        dist.all_to_all_single(taken, given, group=group)
        return given.tolist(), taken.tolist()

    def move(rows: torch.Tensor, given: Sequence[int], taken: Sequence[int]) -> torch.Tensor:
        received = rows.new_empty((sum(taken), *rows.shape[1:]))
        dist.all_to_all_single(received, rows.contiguous(), list(taken), list(given), group=group)
        return received

    return ExpertRanks(count, resolved.mesh.expert_ranks(rank).index(rank), sizes, move)
