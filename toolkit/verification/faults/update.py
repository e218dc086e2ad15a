"""The optimizer updates wrongly, or other parameters."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.faults.base import TORCH_OPTIMIZER, Fault, Patch
from toolkit.verification.faults.helpers import after_adamw, patch_engines


class DecayLost(Fault):
    id = "decay-lost"
    title = "parameter groups collapsed into one, without decay"
    reference = "peft#3503"
    stages = ("update",)
    diagnoses = ("weight-decay-missing",)
    needs: ClassVar = {"optimizer": {"weight_decay": 0.1, "decay": "matrices"}, "adapter": None}

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.training import preparation

        @self.breaking(patch, preparation, "decayed_names")
        def decayed_names(right: Any, model: Any, optimizer: Any) -> frozenset[str]:
            return frozenset()


class DecayOnEverything(Fault):
    id = "decay-on-everything"
    title = "weight decay on norms and biases where groups say not"
    stages = ("update",)
    diagnoses = ("decays-spared-weights",)
    needs: ClassVar = {"optimizer": {"weight_decay": 0.1, "decay": "matrices"}, "adapter": None}

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.training import preparation

        @self.breaking(patch, preparation, "decayed_names")
        def decayed_names(right: Any, model: Any, optimizer: Any) -> frozenset[str]:
            return frozenset(name for name, p in model.named_parameters() if p.requires_grad)


class MasterBf16(Fault):
    id = "master-bf16"
    title = "weights updated in bf16, without float32 masters"
    reference = "accelerate#2624, accelerate#3979"
    stages = ("engagement", "update")
    diagnoses = ("masters-missing", "wrong-dtype")

    def inject(self, patch: Patch, case: Any) -> None:
        def round_weights(optimizer: Any) -> None:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.copy_(parameter.bfloat16())
                    self.reached()

        after_adamw(patch, round_weights)


class OptimizerStale(Fault):
    id = "optimizer-stale"
    title = "the optimizer holds the parameters from before sharding"
    reference = "accelerate#2665, pytorch#149205"
    # In a first step of warm-up the right update is none: there the state that never comes is seen first.
    stages = ("update", "optimizer-state")
    diagnoses = ("other-parameters-updated",)
    strategies = TORCH_OPTIMIZER

    def inject(self, patch: Patch, case: Any) -> None:
        from torch import nn

        def make_optimizer(right: Any) -> Any:
            def wrong(engine: Any, parameters: Any, decayed: Any) -> Any:
                self.reached()
                old = {name: nn.Parameter(p.detach().clone()) for name, p in parameters.items()}
                return right(engine, old, decayed)

            return wrong

        patch_engines(patch, "_make_optimizer", make_optimizer)
