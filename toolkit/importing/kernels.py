"""Liger's kernels, which tools of the transformers Trainer turn on by one switch (transformers 5.23.0, liger.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from toolkit.importing.draft import Draft
from toolkit.importing.table import flag

_PARTS = ("rope", "rms_norm", "swiglu", "geglu", "layer_norm")
_ROUNDING = "kernels: speed and rounding"
_KEYS = ("model.kernels", "loss")


def trainer_kernels(draft: Draft) -> None:
    """``use_liger_kernel`` with ``liger_kernel_config``: by default norms, MLPs, rotary embeddings and the loss."""
    config = draft.get("liger_kernel_config")
    config = config if isinstance(config, dict) else {}
    whole = all(flag(config.get(part, True)) for part in _PARTS)
    carry_liger(draft, "use_liger_kernel", whole, flag(config.get("fused_linear_cross_entropy", True)))
    draft.ignore("liger_kernel_config", _ROUNDING)


def carry_liger(draft: Draft, key: str, whole: bool = True, loss: bool = True) -> None:
    """A switch for Liger's kernels. ``whole``: it replaces all that ``model.kernels: liger`` does; ``loss``: the head's
    loss too."""
    if not draft.active(key):
        draft.ignore(key, "off")
        return
    if flag(draft.get("use_cpu")):
        draft.ignore(key, f"{_ROUNDING}; they need a GPU")
        return
    if whole:
        draft.carry(key, "model.kernels", "liger")
    if loss:
        draft.carry(key, "loss", "fused")
    draft.ignore(key, _ROUNDING)


def leave_out(draft: Draft, problems: Sequence[str]) -> bool:
    """Take keys of Liger's kernels out of a recipe that cannot have them, as ``problems`` say: they change speed and
    rounding alone. Returns whether there were any."""
    found = False
    for recipe_key in _KEYS:
        why = next((problem for problem in problems if f": {recipe_key}: " in problem), None)
        if why is None or draft.origins.get(recipe_key) in (None, "the command line"):
            continue
        found = True
        del draft.values[recipe_key], draft.origins[recipe_key]
        reason = f"{_ROUNDING}; not carried over: {why.partition(f': {recipe_key}: ')[2]}"
        for at, key in enumerate(draft.keys):
            if recipe_key in key.recipe:
                left = tuple(name for name in key.recipe if name != recipe_key)
                outcome = key.outcome if left else "no-effect"
                draft.keys[at] = replace(key, outcome=outcome, recipe=left, reason=reason)
    return found
