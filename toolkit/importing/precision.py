"""The recipe's precision, from the dtype of the weights and of mixed precision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from toolkit.importing.draft import Draft
from toolkit.importing.trainer_parts import as_dtype


def precision(draft: Draft, key: str, amp: str | None, weights: str | None) -> None:
    """Set ``precision``.

    ``amp``: bf16, fp16 or None: what autocast computes in. ``weights``: dtype in which the model is loaded, None where
    the checkpoint decides. An adapter's weights are float32 whatever the base is (PEFT: autocast_adapter_dtype), and
    so are the masters that DeepSpeed and accelerate's FSDP keep under mixed precision.
    """
    weights = weights or checkpoint_dtype(draft)
    adapted = "adapter.method" in draft.values
    masters = str(draft.values.get("strategy.name", "")).startswith(("zero", "fsdp"))
    if amp in ("bf16", "fp16") and (adapted or masters or weights == "float32"):
        draft.carry(key, "precision", amp)
        if adapted and weights not in ("bfloat16", "float16"):
            draft.notes.append(
                "frozen weights are stored in 16 bits: equal if the checkpoint is in 16 bits, else rounded"
            )
    elif amp == "bf16" and weights == "bfloat16":
        draft.carry(key, "precision", "bf16-pure", "the trained weights are loaded in bfloat16")
    elif amp is None and weights == "float32":
        draft.carry(key, "precision", "fp32")
    elif amp is None and weights == "bfloat16" and not adapted:
        draft.carry(key, "precision", "bf16-pure", "weights in bfloat16, no autocast")
    else:
        _uncertain(draft, key, amp, weights)


def amp_of(draft: Draft) -> str | None:
    """Mixed precision by the Trainer's switches, else by the launcher's."""
    for name in ("fp16", "bf16"):
        if draft.active(name):
            return name
    return draft.launcher_amp


def _uncertain(draft: Draft, key: str, amp: str | None, weights: str | None) -> None:
    fallback = amp or ("bf16" if weights in ("bfloat16", "float16") else "fp32")
    draft.set("precision", fallback, "not certain: see above")
    if weights is None:
        draft.differs(key, f"the checkpoint's dtype decides in which dtype weights train; {fallback} is written")
    else:
        compute = amp or "no mixed precision"
        draft.unsupported(key, f"weights in {weights} with {compute}; {fallback} is written")


def checkpoint_dtype(draft: Draft) -> str | None:
    """The dtype that the model's folder names; None for a hub id, or where it names none."""
    path: Any = draft.values.get("model.path")
    if not isinstance(path, str):
        return None
    try:
        config = json.loads((Path(path).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return as_dtype(config.get("dtype") or config.get("torch_dtype")) if isinstance(config, dict) else None
