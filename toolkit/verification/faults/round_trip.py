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

        def delta(right: Any) -> Any:
            def wrong(layer: Any, adapter: str) -> Any:
                self.reached()
                return right(layer, adapter) * 0.5

            return wrong

        patch(Linear, "get_delta_weight", delta)


class ResumeDataReplayed(Fault):
    id = "resume-data-replayed"
    title = "a resumed run sees samples again"
    stages = ("round-trip", "ledger")
    diagnoses = ("resumed-samples",)

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.data.loader import TrainLoader

        def begin(right: Any) -> Any:
            def wrong(loader: Any, *args: Any, **kwargs: Any) -> None:
                if kwargs.get("start_window"):
                    self.reached()
                right(loader, *args, **(kwargs | {"start_window": 0}))

            return wrong

        patch(TrainLoader, "__init__", begin)


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

        def load(right: Any) -> Any:
            def wrong(session: Any, folder: Any) -> Any:
                progress = right(session, folder)
                with torch.no_grad():
                    for parameter in session.engine.model.parameters():
                        if not parameter.requires_grad:
                            self.reached()
                            getattr(parameter, "ds_tensor", parameter).data.zero_()
                return progress

            return wrong

        patch(checkpoint, "load", load)


class ResumeStepLost(Fault):
    id = "resume-step-lost"
    title = "the optimizer's step count is not restored"
    reference = "DeepSpeed#4396"
    stages = ("round-trip",)
    diagnoses = ("step-count-not-restored",)

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.training import checkpoint

        def state(right: Any) -> Any:
            def wrong(step: int | None, *read: Any) -> Any:
                self.reached()
                return right(None if step is None else 0, *read)

            return wrong

        patch(checkpoint, "Saved", state)


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

        def add(right: Any) -> Any:
            def wrong(writer: Any, name: str, shape: Any, values: Any) -> None:
                lost = name.endswith("lora_B.default.weight")
                if lost:
                    self.reached()
                    values = [(piece, torch.zeros_like(tensor)) for piece, tensor in values]
                right(writer, name, shape, values)

            return wrong

        patch(TensorWriter, "add", add)


class SaveStale(Fault):
    id = "save-stale"
    title = "the saved weights are the bf16 copy of float32 masters"
    stages = ("round-trip",)
    diagnoses = ("saved-16-bit-copy",)

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.training.tensor_folder import TensorWriter

        def add(right: Any) -> Any:
            def wrong(writer: Any, name: str, shape: Any, values: Any) -> None:
                self.reached()
                right(writer, name, shape, [(piece, t.bfloat16().to(t.dtype)) for piece, t in values])

            return wrong

        patch(TensorWriter, "add", add)
