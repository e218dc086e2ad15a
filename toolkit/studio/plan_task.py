"""A plan as pieces of a page, fast when little has changed; and `toolkit data` as a page."""

from __future__ import annotations

import json
import re
from typing import Any

from toolkit.errors import InputError
from toolkit.rooms import host_options
from toolkit.studio.recipe_task import checked_recipe, placed
from toolkit.studio.worker import Settings

_PAIR = re.compile(r"(?<![\w.])([a-z_0-9]+(?:\.[a-z_0-9]+)*)=([^\s,;()]+)")
_TINY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
}  # fmt: skip
WARM = json.dumps({"model": {"config": _TINY}, "adapter": {"method": "lora"}, "data": {"train": "x", "max_length": 64},
                   "batch": {"micro_size": 1, "accumulation": 2}, "precision": "bf16", "strategy": {"name": "zero2"},
                   "machine": {"device": "cuda", "processes": 2}})  # fmt: skip


def warm(settings: Settings, arguments: dict[str, Any]) -> bool:
    """Import what a plan needs, and plan a tiny model once."""
    plan(settings, {"text": WARM, "gpu": "h100", "memory": None})
    return True


def plan(settings: Settings, arguments: dict[str, Any]) -> dict[str, Any]:
    """``text``: the recipe. ``gpu``: a name of the device table, or ``memory``: GiB. Both None: this machine's CPU."""
    from toolkit.planning import reuse
    from toolkit.planning.command import Request, make_plan
    from toolkit.report.plan_page import plan_parts

    reuse.keep(8)
    try:
        recipe = checked_recipe(arguments["text"], settings)
        if recipe.machine.device == "auto":
            recipe = recipe.model_copy(update={"machine": recipe.machine.model_copy(update={"device": "cuda"})})
        found = make_plan(Request(recipe, gpu=arguments["gpu"], memory=arguments["memory"], cache=False))
    except InputError as error:
        return {"problems": [placed(problem) for problem in error.problems]}
    document = found.to_json()
    parts = plan_parts(found.search, found.candidates, found.chosen, found.change, document["assumptions"])
    asked = document["candidates"][0]
    return {
        "problems": [],
        **parts,
        "fits": asked["fits"],
        "change": _edits(found.change),
        "chosen": None if document["chosen"] in (None, 0) else way(document["candidates"][document["chosen"]]),
        "ways": [way(candidate) for candidate in document["candidates"]],
        "seconds": document["seconds"],
    }


def _edits(change: str | None) -> list[list[str]]:
    """The keys of plan's answer to «what would make it fit», as a form's changes."""
    return [] if change is None else [[key, value] for key, value in _PAIR.findall(change)]


def way(candidate: dict[str, Any]) -> list[list[str | None]]:
    """The changes that make a candidate of the recipe: those that a plan varies."""
    return [
        ["strategy.name", candidate["strategy"]],
        ["strategy.offload", _unless("none", candidate["offload"])],
        ["activation_checkpointing", _unless("none", candidate["activation_checkpointing"])],
        *([option.key, _unless(option.off_value, candidate[option.key])] for option in host_options()),
        ["loss", _unless("plain", candidate["loss"])],
        ["batch.global_size", None],
        ["batch.micro_size", str(candidate["micro_size"])],
        ["batch.accumulation", str(candidate["accumulation"])],
    ]


def _unless(default: Any, value: Any) -> str | None:
    return None if value == default else str(value).lower()


_ROWS = 10_000


def data(settings: Settings, arguments: dict[str, Any]) -> dict[str, Any]:
    """Samples as the model sees them, lengths, what padding costs. ``text``: the recipe. ``only``: None, cut,
    unsupervised or duplicate."""
    if settings.public:
        raise InputError("this server reads no data")
    from toolkit.inspection.command import Request, inspect
    from toolkit.report.data_page import data_page

    recipe = checked_recipe(arguments["text"], settings)
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"cache": False})})
    found = inspect(Request(recipe, only=arguments["only"], evaluation=arguments["evaluation"], rows=_ROWS))
    return {"page": data_page(found), "refused": len(found.to_json().get("refused", ()))}
