"""Batch normalisation normalises something else than the micro-batch of all ranks."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.diagnose.known import Known
from toolkit.verification.faults.base import DISTRIBUTED, Fault, Patch
from toolkit.verification.faults.helpers import whole_model

_RESNET = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
    "layer_type": "basic",
}


class BatchNormLocal(Fault):
    id = "batch-norm-local"
    title = "batch normalisation normalises each rank's own micro-batch"
    reference = "torch's BatchNorm under DDP, FSDP and ZeRO"
    stages = ("forward",)
    diagnoses = ("batch-statistics-of-each-rank",)
    strategies = DISTRIBUTED
    needs: ClassVar = whole_model(_RESNET, "image-classification", "image", num_labels=3)

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.options.batch_norm.apply import BatchNorm

        @self.breaking(patch, BatchNorm, "_synchronised")
        def synchronised(right: Any, layer: Any, x: Any) -> Any:
            return layer._of_this_rank(x)


FAULTS = (BatchNormLocal,)
DIAGNOSES = {
    "batch-statistics-of-each-rank": Known(
        "batch normalisation normalises each rank's own micro-batch",
        "step {step}: the losses are those of {ranks} separate micro-batches, not of one over all ranks",
        "torch's BatchNorm under DDP, FSDP and ZeRO",
        "model.batch_norm: synchronised",
    ),
    "running-statistics-differ": Known(
        "running statistics of batch normalisation are not those of the batches",
        "{count} comparisons differ, first {first}; the losses agree",
    ),
}
