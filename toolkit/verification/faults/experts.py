"""Experts are divided over ranks, and what these compute, or add up, does not fit together."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any, ClassVar

from toolkit.verification.faults.base import SPLITS_EXPERTS, Fault, Patch
from toolkit.verification.faults.helpers import LORA

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")


class _OfExperts(Fault):
    """Base of faults that need divided experts."""

    stages: ClassVar[tuple[str, ...]] = ("gradient",)
    strategies = SPLITS_EXPERTS
    processes = 4

    @classmethod
    def needs_of(cls, resolved: Any) -> dict[str, Any]:
        """A mixture of experts, which two ranks divide, twice."""
        given = dict(resolved.facts.config or {})
        config = {key: given[key] for key in _SIZES if isinstance(given.get(key), int)}
        config |= {"model_type": "mixtral", "num_attention_heads": 4, "num_key_value_heads": 2}
        config |= {"num_local_experts": 4, "num_experts_per_tok": 2}
        alone = {"shard": 1, "context": 1, "tensor": 1, "pipeline": 1}
        return {
            "model": {"config": config, "path": None, "task": "causal-lm"},
            "strategy": {"mesh": alone | {"replicate": 2, "expert": 2}, "offload": "none", "sync": None},
            "machine": {"processes": 4, "nodes": 1},
            "batch": {
                "micro_size": resolved.micro_size,
                "accumulation": max(2, resolved.accumulation),
                "global_size": None,
            },
            "adapter": None,
            "compile": False,
        }


class CopiesApart(_OfExperts):
    id = "experts-copies-apart"
    title = "the gradients of experts are not added up over the ranks that have the same ones"
    diagnoses = ("expert-copies-not-summed",)

    def inject(self, patch: Patch, case: Any) -> None:
        import torch.distributed as dist

        from toolkit.strategies.layouts.expert.engine import Experts

        copies: list[Any] = []

        @patch.replacing(Experts, "_expert_mesh")
        def expert_mesh(right: Any, engine: Any) -> Any:
            mesh = right(engine)
            copies.append(mesh.get_group("copies"))
            return mesh

        @patch.replacing(dist, "all_reduce")
        def all_reduce(right: Any, tensor: Any, *args: Any, group: Any = None, **kwargs: Any) -> Any:
            if any(group is one for one in copies):
                self.reached()
                return None
            return right(tensor, *args, group=group, **kwargs)


class ScaledByRanks(_OfExperts):
    id = "experts-averaged-over-copies"
    title = "the gradients of experts are averaged over their copies alone, not over all ranks that gave them tokens"
    diagnoses = ("expert-gradients-scaled",)

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.strategies.layouts.expert.engine import Experts

        @patch.replacing(Experts, "average_experts")
        def completed(right: Any, engine: Any) -> None:
            right(engine)
            self.reached()
            for name, parameter in engine.parameters.items():
                if name in engine.divisions:
                    parameter.grad.mul_(engine.resolved.mesh.expert)


class ResultsMisplaced(_OfExperts):
    id = "experts-results-misplaced"
    title = "the results of experts are added in the order of ranks, not of the tokens that they are of"
    stages = ("forward",)
    diagnoses = ("expert-results-misplaced",)

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.model import experts

        @self.breaking(patch, experts, "_places")
        def places(right: Any, order: Any) -> Any:
            return right(order).sort().values


class NormOfOneRank(_OfExperts):
    id = "experts-norm-of-one-rank"
    title = "each rank clips by the norm of its own experts and of the weights that all have"
    stages = ("clip",)
    diagnoses = ("norm-of-one-shard",)

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.strategies.layouts import divided

        def over_ranks(right: Any) -> Any:
            return lambda squares, group: self.reached()

        patch(divided, "_over_ranks", over_ranks)


class AdaptersMixed(_OfExperts):
    id = "experts-adapters-mixed"
    title = "ranks divide the columns of an adapter on experts without regard to experts"
    diagnoses = ("expert-adapters-mixed",)

    @classmethod
    def needs_of(cls, resolved: Any) -> dict[str, Any]:
        """With adapters on experts; PEFT has no dropout there."""
        options = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
        adapter = LORA | {"target_modules": ["q_proj"], "path": None, "dropout": 0.0, "options": options}
        return super().needs_of(resolved) | {"adapter": adapter}

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.model import experts

        @self.breaking(patch, experts, "_columns")
        def columns(right: Any, ranks: Any, rank: int) -> Any:
            return replace(right(ranks, rank), runs=1)


class ShardedOverAll(_OfExperts):
    id = "experts-sharded-over-all"
    title = "experts are sharded over all ranks, as everything else, though these have different ones"
    stages = ("engagement",)
    diagnoses = ("mesh-not-active",)

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.strategies.layouts.expert import engine as expert

        @self.breaking(patch, expert, "_sharded_apart")
        def sharded_apart(right: Any, *given: Any) -> Any:
            return contextlib.nullcontext()
