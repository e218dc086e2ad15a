"""What is saved does not come back."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.faults.base import Fault, Patch
from toolkit.verification.faults.helpers import LORA


class MergeWrong(Fault):
    id = "merge-wrong"
    title = "merged weights answer differently from the live adapter"
    reference = "peft#2025, peft#2803"
    stages = ("round-trip",)
    diagnoses = ("export-differs",)
    needs: ClassVar = {"adapter": LORA}

    def inject(self, patch: Patch, case: Any) -> None:
        from peft.tuners.lora.layer import Linear

        @self.breaking(patch, Linear, "get_delta_weight")
        def delta(right: Any, layer: Any, adapter: str) -> Any:
            return right(layer, adapter) * 0.5


class ResumeDataReplayed(Fault):
    id = "resume-data-replayed"
    title = "a resumed run sees samples again"
    stages = ("round-trip", "ledger")
    diagnoses = ("resumed-samples",)

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.data.loader import TrainLoader

        @patch.replacing(TrainLoader, "__init__")
        def begin(right: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
            if kwargs.get("start_window"):
                self.reached()
            right(loader, *args, **(kwargs | {"start_window": 0}))


class ResumeFrozenLost(Fault):
    id = "resume-frozen-lost"
    title = "frozen weights are missing after a resume"
    reference = "DeepSpeed#3090"
    stages = ("round-trip",)
    diagnoses = ("frozen-weights-not-restored",)
    needs: ClassVar = {"adapter": LORA}

    def inject(self, patch: Patch, case: Any) -> None:
        import torch

        from toolkit.training import checkpoint

        @patch.replacing(checkpoint, "load")
        def load(right: Any, session: Any, folder: Any) -> Any:
            progress = right(session, folder)
            with torch.no_grad():
                for parameter in session.engine.model.parameters():
                    if not parameter.requires_grad:
                        self.reached()
                        getattr(parameter, "ds_tensor", parameter).data.zero_()
            return progress


class ResumeStepLost(Fault):
    id = "resume-step-lost"
    title = "the optimizer's step count is not restored"
    reference = "DeepSpeed#4396"
    stages = ("round-trip",)
    diagnoses = ("step-count-not-restored",)

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.training import checkpoint

        @self.breaking(patch, checkpoint, "Saved")
        def state(right: Any, step: int | None, *read: Any) -> Any:
            return right(None if step is None else 0, *read)


class SaveEmptyAdapter(Fault):
    id = "save-empty-adapter"
    title = "the saved adapter has a tensor without its values"
    reference = "trl#4416, peft#2450, peft#2892"
    stages = ("round-trip",)
    diagnoses = ("saved-tensors-empty",)
    needs: ClassVar = {"adapter": LORA}

    def inject(self, patch: Patch, case: Any) -> None:
        import torch

        from toolkit.training.tensor_folder import TensorWriter

        @patch.replacing(TensorWriter, "add")
        def add(right: Any, writer: Any, name: str, shape: Any, values: Any) -> None:
            lost = name.endswith("lora_B.default.weight")
            if lost:
                self.reached()
                values = [(piece, torch.zeros_like(tensor)) for piece, tensor in values]
            right(writer, name, shape, values)


class SaveStale(Fault):
    id = "save-stale"
    title = "the saved weights are the bf16 copy of float32 masters"
    stages = ("round-trip",)
    diagnoses = ("saved-16-bit-copy",)

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.training.tensor_folder import TensorWriter

        @self.breaking(patch, TensorWriter, "add")
        def add(right: Any, writer: Any, name: str, shape: Any, values: Any) -> None:
            right(writer, name, shape, [(piece, t.bfloat16().to(t.dtype)) for piece, t in values])
