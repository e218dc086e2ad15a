"""The checks of an optimizer's name and of the keys that it has."""

from __future__ import annotations

from typing import Any

from pydantic_core import PydanticCustomError

from toolkit.optimizers import has_key, is_optimizer, optimizer_kind, optimizer_names, own_keys

NOT_PAGED = "not paged; strategy.offload: optimizer keeps the optimizer's state in host memory"
"""What becomes of an optimizer whose state CUDA pages between GPU and host (bitsandbytes)."""


def known_optimizer(name: str) -> str:
    """Validate an optimizer's name; for pydantic."""
    if "paged" in name.lower():
        takes = "adamw8bit" if "8bit" in name.lower() else "lion" if "lion" in name.lower() else "adamw"
        raise ValueError(
            f"there is no paged optimizer: set {takes}, which takes the same steps. To keep the optimizer's state in "
            "host memory, set strategy.offload: optimizer with zero1, zero2 or zero3, or all with zero3, fsdp1 or fsdp2"
        )
    if not is_optimizer(name):
        names = optimizer_names()
        expected = ", ".join(map(repr, names[:-1])) + f" or {names[-1]!r}"
        raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})
    return name


def list_optimizers(schema: dict[str, Any]) -> None:
    """Put the names into the JSON schema of the key; for pydantic."""
    schema["enum"] = list(optimizer_names())


def check_key(name: str, key: str, value: Any) -> None:
    """Raise ValueError if a written ``key`` is not one of the optimizer's."""
    if value is None or has_key(name, key):
        return
    owners = ", ".join(own_keys()[key])
    raise ValueError(f"{name} does not have this key ({owners}: yes); remove it")


def with_defaults(values: Any) -> Any:
    """The section as written, with the optimizer's own defaults filled in."""
    name = values.get("name", "adamw") if isinstance(values, dict) else None
    if not isinstance(name, str) or not is_optimizer(name):
        return values
    own = optimizer_kind(name).defaults
    return values | {key: value for key, value in own.items() if values.get(key) is None}


def without_others(name: str, values: dict[str, Any]) -> dict[str, Any]:
    """The section as it is written to a file: without the keys of other optimizers, and without what later versions
    added where it has its default, so that files of earlier recipes do not change."""
    later: dict[str, Any] = {"lr_scaling": "none", "base_global_batch": None, "groups": [], "rounding": "nearest"}
    return {k: v for k, v in values.items() if has_key(name, k) and not (k in later and v == later[k])}
