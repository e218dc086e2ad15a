"""The recipe's adapter, from a tool's LoRA settings."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

from toolkit.importing.draft import Draft
from toolkit.importing.table import flag

_ALL = ("all-linear", "all", "linear", "ALL")


def lora(
    draft: Draft,
    *,
    r: str,
    alpha: str,
    dropout: str,
    targets: str,
    saved: str,
    dora: str | None = None,
    every: bool = False,
) -> None:
    """Set ``adapter.*`` from keys of these names; the tool's defaults apply where a file has none.

    ``every``: another key adds every linear layer to the targets.
    """
    dora_on = dora is not None and flag(draft.get(dora))
    draft.set("adapter.method", "dora" if dora_on else "lora", "the tool trains an adapter")
    if dora is not None and dora_on:
        draft.carry(dora, "adapter.method", "dora")
    elif dora is not None:
        draft.ignore(dora, "off")
    draft.carry(r, "adapter.r", draft.whole(r))
    if draft.get(alpha) is not None:
        value = draft.number(alpha)
        draft.carry(alpha, "adapter.alpha", int(value) if value == int(value) else value)
    draft.carry(dropout, "adapter.dropout", draft.number(dropout, 0.0))
    if draft.get(saved):
        draft.carry(saved, "adapter.modules_to_save", draft.names(saved))
    draft.ignore(saved, "empty")
    if not every:
        _targets(draft, targets)
        return
    beyond = [name for name in draft.names(targets) if "emb" in name or name == "lm_head"]
    if beyond:
        draft.unsupported(targets, f"{', '.join(beyond)} besides every linear layer")
    draft.ignore(targets, "every linear layer is a target")


def _targets(draft: Draft, key: str) -> None:
    value = draft.get(key)
    chosen = draft.names(key)
    if len(chosen) == 1 and chosen[0] in _ALL:
        draft.carry(key, "adapter.target_modules", "all-linear")
    elif isinstance(value, str) and len(chosen) == 1 and set(value) & set("*|^$\\("):
        draft.carry(key, "adapter.target_modules", value, "a regular expression")
    elif chosen:
        draft.carry(key, "adapter.target_modules", chosen)
    else:
        found = _targets_of_peft(model_type(draft))
        if found:
            draft.carry(key, "adapter.target_modules", found, f"PEFT's default for {model_type(draft)}")
        else:
            draft.differs(key, "PEFT's default depends on the model's type; q_proj and v_proj are written")
            draft.set("adapter.target_modules", ["q_proj", "v_proj"], "not certain: PEFT's default for most models")


def model_type(draft: Draft) -> str | None:
    """``model_type`` of the model's folder; None for a hub id."""
    path: Any = draft.values.get("model.path")
    try:
        config = json.loads((Path(str(path)).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    found = config.get("model_type") if isinstance(config, dict) else None
    return found if isinstance(found, str) else None


def _targets_of_peft(kind: str | None) -> list[str]:
    return [] if kind is None else _peft_table().get(kind, [])


@functools.cache
def _peft_table() -> dict[str, list[str]]:
    """PEFT's own table of default targets, read from its source: importing it would import torch."""
    spec = importlib.util.find_spec("peft")
    if spec is None or spec.origin is None:
        return {}
    tree = ast.parse((Path(spec.origin).parent / "utils" / "constants.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING"
            for target in node.targets
        ):
            return {str(key): list(value) for key, value in ast.literal_eval(node.value).items()}
    return {}
