"""The recipe as text, with a comment at each key that says where it comes from."""

from __future__ import annotations

from typing import Any

from toolkit.importing.draft import Draft
from toolkit.importing.outcome import Key
from toolkit.recipe.schema import Recipe
from toolkit.recipe.yaml_text import scalar


def nested(values: dict[str, Any]) -> dict[str, Any]:
    """``{"model.path": x}`` as ``{"model": {"path": x}}``, in the order of the schema."""
    found: dict[str, Any] = {}
    for section in Recipe.model_fields:
        inside = {key.partition(".")[2]: value for key, value in values.items() if key.startswith(f"{section}.")}
        if inside and section == "options":  # the one section with names between it and its keys
            names = dict.fromkeys(key.partition(".")[0] for key in inside)
            inside = {name: {k.partition(".")[2]: v for k, v in inside.items() if k.startswith(f"{name}.")}
                      for name in names}  # fmt: skip
        if inside:
            found[section] = inside
        elif section in values:
            found[section] = values[section]
    return found


def recipe_text(draft: Draft, source: str, name: str) -> str:
    """The recipe's YAML. ``source``: the file that it comes from; ``name``: of the tool."""
    lost = [key for key in draft.keys if key.lost]
    lines = [f"# Imported from {source} ({name}; keys of {draft.version}) by toolkit import."]
    if lost:
        lines.append("# Not the same training. These settings are not carried over, or not exactly:")
        lines += [f"#   {key.line()}" for key in lost]
    else:
        lines.append("# Every setting that decides about training is carried over.")
    lines += [f"# Note: {note}" for note in draft.notes]
    for section, value in nested(draft.values).items():
        if isinstance(value, dict):
            lines.append(f"{section}:")
            lines += [_line(f"  {key}", inside, _origin(draft, f"{section}.{key}")) for key, inside in value.items()]
        else:
            lines.append(_line(section, value, draft.origins.get(section)))
    lines += _without_effect([key for key in draft.keys if key.outcome == "no-effect"])
    return "\n".join(lines) + "\n"


def _origin(draft: Draft, key: str) -> str | None:
    """Where a key comes from, or what is below it."""
    found = [origin for name, origin in draft.origins.items() if name == key or name.startswith(f"{key}.")]
    return "; ".join(dict.fromkeys(found)) or None


def _line(key: str, value: Any, origin: str | None) -> str:
    text = f"{key}: {scalar(value)}"
    return f"{text}  # {origin}" if origin else text


def _without_effect(keys: list[Key]) -> list[str]:
    if not keys:
        return []
    return ["# No effect on what is trained:", *(f"#   {key.line()}" for key in keys)]
