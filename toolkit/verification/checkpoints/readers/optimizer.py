"""An optimizer's ``state_dict`` and a schedule's, as torch writes them: by number, or by name (FSDP)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from toolkit.verification.checkpoints.contents import MOMENTS, Checkpoint, Numbered, StoredTensor


def is_optimizer(document: Any) -> bool:
    """Whether this is the ``state_dict`` of a torch optimizer."""
    return isinstance(document, dict) and isinstance(document.get("state"), dict) and "param_groups" in document


def add_optimizer(checkpoint: Checkpoint, document: Mapping[str, Any]) -> None:
    """Take over moments, step, learning rates and weight decay. Numbered moments are named later (``numbered.py``)."""
    state, groups = document["state"], document["param_groups"]
    groups = [group for group in groups if isinstance(group, dict)] if isinstance(groups, (list, tuple)) else []
    if state and all(isinstance(key, str) for key in state):
        for name, values in state.items():
            for moment in MOMENTS:
                if isinstance(values.get(moment), torch.Tensor):
                    checkpoint.moments[moment][name] = StoredTensor.of(values[moment])
        for group in groups:
            for name in group.get("params", ()):
                if isinstance(name, str) and isinstance(group.get("weight_decay"), float):
                    checkpoint.decay[name] = group["weight_decay"]
    elif state:
        checkpoint.numbered = _numbered(state, groups)
        if not any(checkpoint.numbered.states.values()):
            checkpoint.numbered = None
            checkpoint.notes.append("the optimizer has no exp_avg and exp_avg_sq: moments are not compared")
    steps = [_number(values.get("step")) for values in state.values() if isinstance(values, dict)]
    steps += [_number(group.get("step")) for group in groups]  # apex and DeepSpeed's FusedAdam keep it there
    add_step(checkpoint, max((int(step) for step in steps if step is not None), default=None))
    add_rates(checkpoint, groups)


def _numbered(state: Mapping[Any, Any], groups: list[dict[str, Any]]) -> Numbered:
    states = {
        int(number): {m: StoredTensor.of(values[m]) for m in MOMENTS if isinstance(values.get(m), torch.Tensor)}
        for number, values in state.items()
        if isinstance(values, dict) and str(number).isdigit()
    }
    names: dict[int, str] = {}
    for group in groups:
        if isinstance(group.get("param_names"), (list, tuple)):
            names |= dict(zip(group["params"], group["param_names"], strict=False))
    return Numbered(
        states,
        tuple(tuple(group.get("params", ())) for group in groups),
        tuple(_number(group.get("weight_decay")) for group in groups),
        names,
    )


def add_step(checkpoint: Checkpoint, step: int | None) -> None:
    """The first source that knows the number of steps is kept."""
    if checkpoint.step is None and step:
        checkpoint.step = step


def add_rates(checkpoint: Checkpoint, groups: list[dict[str, Any]]) -> None:
    """Learning rates of the next step, and the schedule's largest, from an optimizer's groups."""
    rates = [_number(group.get("lr")) for group in groups]
    if rates and None not in rates and not checkpoint.learning_rate:
        checkpoint.learning_rate = tuple(rate for rate in rates if rate is not None)
    first = [_number(group.get("initial_lr", group.get("lr"))) for group in groups]
    known = [rate for rate in first if rate is not None]
    if known and checkpoint.peak is None:
        checkpoint.peak = max(known)


def add_schedule(checkpoint: Checkpoint, document: Any) -> None:
    """The same from the ``state_dict`` of one of torch's schedules, which takes precedence for the largest rate."""
    if not isinstance(document, dict):
        return
    last, base = document.get("_last_lr"), document.get("base_lrs")
    if isinstance(last, list) and last and not checkpoint.learning_rate:
        checkpoint.learning_rate = tuple(float(_number(rate) or 0.0) for rate in last)
    if isinstance(base, list) and base:
        checkpoint.peak = max(float(_number(rate) or 0.0) for rate in base)


def _number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
