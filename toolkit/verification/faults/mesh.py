"""Parts of the state, and of rows, are divided over the axes of a mesh, and these are confused."""

from __future__ import annotations

from typing import Any

from toolkit.verification.faults.base import HYBRID, HYBRID_STATE, SECOND_COPIES, Fault, Patch


class _OfMeshes(Fault):
    """Base of faults that need ranks which hold copies, and ranks which hold parts."""

    processes = 4

    @classmethod
    def needs_of(cls, resolved: Any) -> dict[str, Any]:
        if resolved.mesh.hybrid:
            return {}
        batch = {"micro_size": resolved.micro_size, "accumulation": resolved.accumulation, "global_size": None}
        return {
            "strategy": {"mesh": {"replicate": 2, "shard": 2}},
            "machine": {"processes": 4, "nodes": 1},
            "batch": batch,
        }


class ReplicasNotReduced(_OfMeshes):
    id = "replicas-not-reduced"
    title = "gradients are reduced within each group of shards, never over the groups"
    stages = ("gradient",)
    diagnoses = ("gradient-of-one-copy",)
    strategies = HYBRID_STATE

    def inject(self, patch: Patch, case: Any) -> None:
        import torch.distributed as dist

        mesh = case.resolved().mesh

        @patch.replacing(dist, "all_reduce")
        def all_reduce(right: Any, tensor: Any, *args: Any, group: Any = None, **kwargs: Any) -> Any:
            place = mesh.place(dist.get_rank())
            copies = list(range(place, mesh.replicate * mesh.shard, mesh.shard))
            if group is not None and dist.get_process_group_ranks(group) == copies:
                self.reached()
                return None
            return right(tensor, *args, group=group, **kwargs)


class ReplicasCountedTwice(_OfMeshes):
    id = "replicas-counted-twice"
    title = "the loss is multiplied by the number of copies once more"
    stages = ("gradient",)
    # Where accumulation, or all ranks, are as many as the copies, the factor is theirs too.
    diagnoses = ("gradients-of-copies-added", "accumulation-summed", "ranks-summed")
    strategies = HYBRID

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.strategies.engines.base import Engine

        @patch.replacing(Engine, "__init__")
        def init(right: Any, engine: Any, *args: Any) -> None:
            right(engine, *args)
            self.reached()
            engine.gradient_divisor *= engine.resolved.mesh.replicate


class SecondCopyStale(_OfMeshes):
    id = "second-copy-stale"
    title = "the second copy of the weights (hpZ) is not renewed after a step"
    reference = "deepspeed 0.19.8, runtime/zero/stage3.py, invalidate_secondary_tensor"
    stages = ("forward",)
    diagnoses = ("weights-of-an-earlier-step",)
    strategies = SECOND_COPIES

    def inject(self, patch: Patch, case: Any) -> None:
        from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

        @self.breaking(patch, DeepSpeedZeroOptimizer_Stage3, "invalidate_secondary_tensor")
        def invalidate(right: Any, zero: Any) -> None:
            pass
