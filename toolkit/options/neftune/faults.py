"""How NEFTune goes wrong, and what `verify` says of it."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.diagnose.known import MISSING, Known
from toolkit.verification.faults.base import Fault, Patch


class NoiseOfPaddedLength(Fault):
    id = "neftune-padded-length"
    title = "NEFTune's noise is scaled by the padded length of a batch"
    reference = "transformers 5.23.0, integrations/neftune.py"
    stages = ("forward",)
    diagnoses = ("noise-of-padded-length",)
    needs: ClassVar = {"model": {"neftune_alpha": 5.0}, "data": {"packing": False}}

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.options.neftune import apply

        @self.breaking(patch, apply, "noise_scale")
        def noise_scale(right: Any, tensors: Any, alpha: float, width: int) -> Any:
            return right({"input_ids": tensors["input_ids"]}, alpha, width)


FAULTS = (NoiseOfPaddedLength,)
DIAGNOSES = {
    "noise-of-padded-length": Known(
        "the noise on embeddings depends on how a batch is padded",
        "step {step}: the losses are those with noise scaled by the padded length, not by each sample's own",
        "transformers 5.23.0, integrations/neftune.py",
    ),
    "noise-missing": Known("noise on the embeddings is set and not added in every forward", MISSING),
}
