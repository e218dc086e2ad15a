"""Labels of a sample with images are at the wrong places."""

from __future__ import annotations

from typing import Any

from toolkit.verification.faults.base import Fault, Patch
from toolkit.verification.faults.helpers import whole_model

_TEXT = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 160, "head_dim": 8, "max_position_embeddings": 512,
}  # fmt: skip
_EYE = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
_SMOLVLM = {
    "model_type": "smolvlm", "image_token_id": 150, "scale_factor": 2, "pad_token_id": 0, "text_config": _TEXT,
    "vision_config": _EYE,
}  # fmt: skip


class ImageTokensMasked(Fault):
    id = "image-tokens-masked"
    title = "the mask of an image's tokens is one token off: its last one is supervised, and the word behind it is not"
    stages = ("ledger",)
    diagnoses = ("image-tokens-supervised",)

    @classmethod
    def needs_of(cls, resolved: Any) -> dict[str, Any]:
        if resolved.recipe.model.task == "image-text-to-text":
            return {}
        return whole_model(_SMOLVLM, "image-text-to-text", "messages")

    def inject(self, patch: Patch, case: Any) -> None:
        from dataclasses import replace

        from torch.nn import functional

        from toolkit.data import loader
        from toolkit.data.media import with_defaults
        from toolkit.tasks import task_of
        from toolkit.tasks.labels import IGNORED
        from toolkit.verification.cases.case import Case

        if not isinstance(case, Case):
            return  # samples of conversations, which this loader does not collate
        config = with_defaults(case.resolved().facts.config or {})
        framed = task_of("image-text-to-text").media.in_text(config, 1)  # type: ignore[union-attr, misc]
        last = max(set(framed), key=framed.count)

        @patch.replacing(loader, "collate")
        def collate(right: Any, *args: Any, **kwargs: Any) -> Any:
            micro = right(*args, **kwargs)
            ids, labels = micro.tensors["input_ids"], micro.tensors["labels"].clone()
            ends = (ids == last) & (functional.pad(ids[:, 1:], (0, 1), value=-1) != last)
            # A blank row has no labels at all, and is no sample.
            ends &= labels.ne(IGNORED).any(1, keepdim=True)
            if ends.any():
                self.reached()
            labels[functional.pad(ends[:, :-1], (1, 0))] = IGNORED
            labels[ends] = last
            return replace(micro, tensors=micro.tensors | {"labels": labels})
