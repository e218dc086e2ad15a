"""Options of training that are set and not applied, or applied otherwise."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.faults.base import Fault, Patch


class FreezeIgnored(Fault):
    id = "freeze-ignored"
    title = "parameters that the recipe freezes are trained"
    stages = ("gradient", "engagement")
    diagnoses = ("frozen-weight-trains", "other-parameters-train")
    needs: ClassVar = {"model": {"freeze": ["mlp|fc|lin"]}, "adapter": None}

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.training import preparation

        @self.breaking(patch, preparation, "freeze_matching")
        def freeze_matching(right: Any, model: Any, patterns: Any, source: str) -> Any:
            return []


class LabelSmoothingIgnored(Fault):
    id = "label-smoothing-ignored"
    title = "label smoothing is set and not applied"
    stages = ("forward",)
    diagnoses = ("loss-term-missing",)
    needs: ClassVar = {"label_smoothing": 0.1}

    def inject(self, patch: Patch, case: Any) -> None:
        from dataclasses import replace

        from toolkit.model.loss_terms import LossTerms

        def of(right: Any) -> Any:
            def wrong(recipe: Any) -> Any:
                self.reached()
                return replace(right(recipe), smoothing=0.0)

            return staticmethod(wrong)

        patch(LossTerms, "of", of)


class ZLossUnmasked(Fault):
    id = "z-loss-unmasked"
    title = "the z-loss counts tokens without labels too"
    stages = ("forward",)
    diagnoses = ("z-loss-of-every-token",)
    needs: ClassVar = {"z_loss": 1.0e-3, "loss": "plain"}

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.training import loss

        @self.breaking(patch, loss, "squared_logsumexp")
        def squared_logsumexp(right: Any, logits: Any, targets: Any) -> Any:
            return right(logits, targets.clamp(min=0))
