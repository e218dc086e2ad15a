"""Blocks are divided over the stages of a pipeline, and what these compute of the model does not fit together."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.faults.base import STAGES, STAGES_OF_COPIES, Fault, Patch

_ALONE = {"replicate": 1, "shard": 1, "context": 1, "tensor": 1}


class _OfStages(Fault):
    """Base of faults that need stages."""

    stages: ClassVar[tuple[str, ...]] = ("gradient",)
    strategies = STAGES
    processes = 4

    @classmethod
    def needs_of(cls, resolved: Any) -> dict[str, Any]:
        """Two stages of two ranks each, and micro-batches that can be confused."""
        config = dict(resolved.facts.config or {})
        needs = {"model": {"config": config | cls.of_model(config), "path": None}}
        accumulation = max(2, resolved.accumulation)
        if resolved.mesh.pipeline > 1 and (resolved.world_size, resolved.accumulation) == (cls.processes, accumulation):
            return needs if cls.of_model(config) else {}
        rows = {"shard" if resolved.traits.shards else "replicate": 2}
        return needs | {
            "strategy": {"mesh": _ALONE | rows | {"pipeline": 2}, "offload": "none", "sync": None},
            "machine": {"processes": 4, "nodes": 1},
            "batch": {"micro_size": resolved.micro_size, "accumulation": accumulation, "global_size": None},
            "compile": False,
        }

    @classmethod
    def of_model(cls, config: dict[str, Any]) -> dict[str, Any]:
        """What the fault needs of the model's config."""
        return {}


class SharedGradientApart(_OfStages):
    id = "stages-shared-gradient-apart"
    title = "the gradient of a tied head is not added to that of the embedding, which another stage has"
    diagnoses = ("shared-gradient-of-one-stage",)

    @classmethod
    def of_model(cls, config: dict[str, Any]) -> dict[str, Any]:
        return {"tie_word_embeddings": True}

    @classmethod
    def needs_of(cls, resolved: Any) -> dict[str, Any]:
        """A shared weight that trains."""
        return super().needs_of(resolved) | {"adapter": None}

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.strategies.layouts.pipeline import engine as stages

        def over_ends(right: Any) -> Any:
            return lambda gradient, group: self.reached()

        patch(stages, "_over_ends", over_ends)


class DividedAgain(_OfStages):
    id = "stages-divided-by-micro-batches"
    title = "the schedule divides gradients by the number of micro-batches, as the loss already is"
    reference = "torch 2.13.0, torch.distributed.pipelining: scale_grads, True by default"
    diagnoses = ("accumulation-divided-twice",)

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.strategies.layouts.pipeline.engine import Staged

        @patch.replacing(Staged, "unscale")
        def unscale(right: Any, engine: Any) -> None:
            micros = len(engine.pipeline.actions) // 2
            for parameter in engine.parameters.values():
                if parameter.grad is not None and micros > 1:
                    self.reached()
                    parameter.grad.div_(micros)
            right(engine)


class MicroBatchDropped(_OfStages):
    id = "stages-micro-batch-dropped"
    title = "the schedule has no place for the last micro-batch of a window"
    stages = ("ledger",)
    diagnoses = ("micro-batches-dropped",)

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.training import pipeline

        @patch.replacing(pipeline, "one_forward_one_backward")
        def schedule(right: Any, stage: int, stages: int, micros: int) -> Any:
            if micros == 1:
                return right(stage, stages, micros)
            self.reached()
            return right(stage, stages, micros - 1)


class LastBackwardMissing(_OfStages):
    id = "stages-last-backward-missing"
    title = "the schedule ends before the backward of the last micro-batch"
    diagnoses = ("micro-batches-dropped",)

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.training import pipeline

        @patch.replacing(pipeline, "one_forward_one_backward")
        def schedule(right: Any, stage: int, stages: int, micros: int) -> Any:
            found = right(stage, stages, micros)
            if micros == 1:
                return found
            self.reached()
            return [action for action in found if action != ("backward", micros - 1)]


class NormOfOneStage(_OfStages):
    id = "stages-norm-of-one"
    title = "each stage clips by the norm of its own blocks"
    stages = ("clip",)
    diagnoses = ("norm-of-one-shard",)

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.strategies.layouts.pipeline import engine as stages

        def over_stages(right: Any) -> Any:
            return lambda squares, group: self.reached()

        patch(stages, "_over_stages", over_stages)


class CopiesApart(_OfStages):
    id = "stages-copies-not-averaged"
    title = "ranks that have the same blocks each keep their own gradient"
    diagnoses = ("ranks-not-reduced", "tensors-not-reduced")
    strategies = STAGES_OF_COPIES

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.strategies.engines.replicated import DdpEngine

        def average(right: Any) -> Any:
            return lambda engine: self.reached()

        patch(DdpEngine, "_average", average)


class MasksAlike(_OfStages):
    id = "stages-masks-alike"
    title = "every stage draws the dropout masks of the first one"
    stages = ("forward", "gradient")
    diagnoses = ("masks-of-another-stage",)

    @classmethod
    def of_model(cls, config: dict[str, Any]) -> dict[str, Any]:
        return {"attention_dropout": 0.3}

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.training.session import Session

        def rank(right: Any) -> Any:
            def wrong(session: Any) -> int:
                self.reached()
                return int(session.token_rank)

            return property(wrong)

        patch(Session, "mask_rank", rank)
