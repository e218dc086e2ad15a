"""The schedules of the transformers Trainer and their arguments (transformers 5.23.0, optimization.py)."""

from __future__ import annotations

import json
from typing import Any

from toolkit.importing.draft import Draft

# With its default of one cycle, a cosine with hard restarts never restarts.
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_restarts": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
    "polynomial": "polynomial",
    "inverse_sqrt": "inverse-sqrt",
    "warmup_stable_decay": "wsd",
}
_WITH_ARGUMENTS = ("cosine_with_min_lr", "polynomial", "inverse_sqrt", "warmup_stable_decay")
_POLYNOMIAL_END = 1e-7
"""``get_polynomial_decay_schedule_with_warmup``: default of ``lr_end``."""


def course(draft: Draft) -> str:
    """Carry the schedule and its arguments; returns the Trainer's name of it."""
    name = str(draft.get("lr_scheduler_type"))
    found = SCHEDULES.get(name)
    given = _mapping(draft.get("lr_scheduler_kwargs"))
    if found is None:
        known = ", ".join(dict.fromkeys(SCHEDULES.values()))
        draft.unsupported("lr_scheduler_type", f"the recipe has {known}, not {name}")
    else:
        draft.carry("lr_scheduler_type", "schedule.name", found)
    if name in _WITH_ARGUMENTS and given is not None:
        _arguments(draft, name, dict(given))
    elif given != {}:
        draft.unsupported("lr_scheduler_kwargs", f"the recipe's {found or 'schedules'} has no further arguments")
    draft.ignore("lr_scheduler_kwargs", "empty")
    return name


def _arguments(draft: Draft, name: str, given: dict[str, Any]) -> None:
    peak = draft.number("learning_rate")
    carried: dict[str, Any] = {}
    if name == "cosine_with_min_lr":
        least, rate = given.pop("min_lr", None), given.pop("min_lr_rate", None)
        carried["min_ratio"] = float(rate) if rate is not None else float(least or 0.0) / peak
    elif name == "polynomial":
        carried["min_ratio"] = float(given.pop("lr_end", _POLYNOMIAL_END)) / peak
        carried["power"] = float(given.pop("power", 1.0))
    elif name == "warmup_stable_decay":
        carried["decay_shape"] = given.pop("decay_type", "cosine")
        carried["min_ratio"] = float(given.pop("min_lr_ratio", 0.0))
        steps = given.pop("num_decay_steps", None)
        if steps is None:
            draft.block("lr_scheduler_type", "warmup_stable_decay needs lr_scheduler_kwargs with num_decay_steps")
        else:
            carried["decay_steps"] = int(steps)
        if carried["min_ratio"]:
            draft.differs("lr_scheduler_kwargs", "with min_lr_ratio the Trainer's warm-up begins there, not at 0")
        if given.get("warmup_type") == "linear":
            given.pop("warmup_type")
    for key, value in carried.items():
        draft.carry("lr_scheduler_kwargs", f"schedule.{key}", value)
    if given:
        draft.unsupported("lr_scheduler_kwargs", f"the recipe's schedule has no {', '.join(given)}")


def _mapping(value: Any) -> dict[str, Any] | None:
    """The arguments, also from JSON text; None if they are something else."""
    if value in (None, "", {}, "{}"):
        return {}
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    return value if isinstance(value, dict) else None
