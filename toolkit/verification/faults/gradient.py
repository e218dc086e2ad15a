"""The gradient of some tensors is wrong."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.faults.base import ALL_REDUCED, GATHERED_BY_DEEPSPEED, WITHOUT_GRADIENT, Fault, Patch
from toolkit.verification.faults.helpers import DROPPING, LORA


class CheckpointNoGrad(Fault):
    id = "checkpoint-no-grad"
    title = "reentrant checkpointing with frozen embeddings: no gradients"
    reference = "transformers#26221, trl#3089"
    stages = ("gradient",)
    diagnoses = ("reentrant-checkpointing",)
    # DDP refuses by itself: parameters took no part in the loss.
    strategies = WITHOUT_GRADIENT
    # The head trains too, so that the backward has something to reach.
    needs: ClassVar = {"activation_checkpointing": "full", "adapter": LORA | {"modules_to_save": ["lm_head"]}}

    def inject(self, patch: Patch, case: Any) -> None:
        import functools

        from toolkit.model import checkpointing

        @self.breaking(patch, checkpointing, "checkpoint")
        def checkpoint(right: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
            own = {"use_reentrant", "preserve_rng_state", "context_fn"}
            others = {key: value for key, value in kwargs.items() if key not in own}
            return right(functools.partial(function, **others), *args, use_reentrant=True)


class DropoutRedrawn(Fault):
    id = "dropout-redrawn"
    title = "recompute in checkpointing draws new dropout masks"
    reference = "accelerate 1.15.0 FSDP2 (preserve_rng_state=False), OLMo-core#828"
    stages = ("gradient",)
    diagnoses = ("dropout-mask-redrawn",)
    needs: ClassVar = {"activation_checkpointing": "full", "adapter": DROPPING}

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.model import checkpointing

        @self.breaking(patch, checkpointing, "checkpoint")
        def checkpoint(right: Any, *args: Any, **kwargs: Any) -> Any:
            return right(*args, **(kwargs | {"preserve_rng_state": False}))


class GradAccumBf16(Fault):
    id = "grad-accum-bf16"
    title = "gradients accumulated in bf16 where fp32 was asked"
    reference = "DeepSpeed#1800, DeepSpeed#2768"
    stages = ("engagement", "gradient")
    diagnoses = ("sums-rounded-to-16-bits", "wrong-dtype")
    needs: ClassVar = {"precision": "bf16", "batch": {"accumulation": 3, "micro_size": 2, "global_size": None}}

    def inject(self, patch: Patch, case: Any) -> None:
        import torch

        from toolkit.strategies.engines.base import Engine
        from toolkit.strategies.zero import Zero1

        @patch.replacing(Engine, "backward")
        def backward(right: Any, engine: Any, loss: Any, last: bool) -> None:
            right(engine, loss, last)
            for parameter in engine.parameters.values():
                if parameter.grad is not None:
                    self.reached()
                    with torch.no_grad():
                        parameter.grad.copy_(parameter.grad.bfloat16())

        @patch.replacing(Zero1.__mro__[1], "deepspeed_config")
        def config(right: Any, strategy: Any, resolved: Any) -> Any:
            written = right(strategy, resolved)
            if resolved.precision.mixed:
                self.reached()
                written["data_types"] = {"grad_accum_dtype": "bf16"}
            return written


class GradBucketSkipped(Fault):
    id = "grad-bucket-skipped"
    title = "one bucket of gradients is never reduced"
    reference = "DeepSpeed#4321"
    stages = ("gradient", "cross-rank")
    diagnoses = ("tensors-not-reduced",)
    strategies = ALL_REDUCED

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.strategies.engines.replicated import DdpEngine
        from toolkit.strategies.engines.zero import ZeroEngine

        def hook(state: Any, bucket: Any) -> Any:
            from torch.distributed import group
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

            assert group.WORLD is not None
            own = bucket.gradients()[0].clone()

            def restored(reduced: Any) -> Any:
                self.reached()
                bucket.gradients()[0].copy_(own)
                return reduced.value()[0]

            return allreduce_hook(group.WORLD, bucket).then(restored)

        @patch.replacing(DdpEngine, "wrap")
        def wrap(right: Any, engine: Any, model: Any) -> Any:
            wrapped = right(engine, model)
            wrapped.register_comm_hook(None, hook)
            return wrapped

        @patch.replacing(ZeroEngine, "backward")
        def backward(right: Any, engine: Any, loss: Any, last: bool) -> None:
            import deepspeed.comm

            once = Patch()
            once(deepspeed.comm, "all_reduce", lambda reduce: self._but_the_first(reduce))
            try:
                right(engine, loss, last)
            finally:
                once.undo()

    def _but_the_first(self, reduce: Any) -> Any:
        skipped = False

        def wrong(*args: Any, **kwargs: Any) -> Any:
            nonlocal skipped
            if skipped:
                return reduce(*args, **kwargs)
            skipped = True
            self.reached()
            return None

        return wrong


class RecomputeBiasTwice(Fault):
    id = "recompute-bias-twice"
    title = "recomputation adds a bias twice: a kept product was changed in place"
    reference = "deepspeed 0.19.8, runtime/zero/linear.py; torch 2.13.0, selective checkpointing"
    stages = ("gradient",)
    diagnoses = ("bias-added-twice",)
    strategies = GATHERED_BY_DEEPSPEED
    # Linear layers with a bias, whose first value is not what it comes to be.
    needs: ClassVar = {"activation_checkpointing": "selective", "model": {"config": {"attention_bias": True}}}

    def inject(self, patch: Patch, case: Any) -> None:
        import functools
        import importlib

        from deepspeed.runtime.zero import linear
        from torch.utils.checkpoint import create_selective_checkpoint_contexts

        from toolkit.model import checkpointing
        from toolkit.strategies.engines import zero

        def keep_products(right: Any) -> Any:
            def wrong() -> Any:
                self.reached()
                return create_selective_checkpoint_contexts(checkpointing.keep_costly)

            return functools.wraps(right)(wrong)

        def round_once(right: Any) -> Any:
            return lambda: importlib.reload(linear)  # DeepSpeed's own again

        patch(checkpointing, "keep_products", keep_products)
        patch(zero, "_round_once", round_once)


class TiedWeightsSplit(Fault):
    id = "tied-weights-split"
    title = "embedding and head are no longer tied"
    reference = "verl#7834, lingua#75"
    stages = ("gradient", "engagement")
    diagnoses = ("tied-weights-separate",)

    @classmethod
    def needs_of(cls, resolved: Any) -> dict[str, Any]:
        return {"adapter": None, "model": {"config": dict(resolved.facts.config or {}) | {"tie_word_embeddings": True},
                                           "path": None}}  # fmt: skip

    def inject(self, patch: Patch, case: Any) -> None:
        from torch import nn

        from toolkit.training import preparation

        @patch.replacing(preparation, "load_base")
        def load_base(right: Any, *args: Any, **kwargs: Any) -> Any:
            model = right(*args, **kwargs | {"by_part": False})  # with the values that are changed here
            head = model.get_output_embeddings()
            head.weight = nn.Parameter(head.weight.detach().clone())
            self.reached()
            return model
