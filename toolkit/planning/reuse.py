"""Planners that are kept between plans of one process: the same model, traced again, is the time of a plan."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import TYPE_CHECKING

from toolkit.recipe.resolve import Resolved
from toolkit.recipe.tokenizer_facts import added_tokens
from toolkit.rooms import host_options

if TYPE_CHECKING:
    from toolkit.planning.images import Images
    from toolkit.planning.loops import Loop
    from toolkit.planning.predict import Planner

_kept: OrderedDict[str, Planner] = OrderedDict()
_limit = 0

# What the candidates of one planner differ in (toolkit/planning/search.py), and what no trace depends on.
_VARIED = ("strategy", "batch", "activation_checkpointing", "loss")
_ELSEWHERE = ("machine", "run", "schedule", "tokenizer")


def keep(count: int) -> None:
    """From now on keep the last ``count`` planners. For a process that plans many times; 0, the default: none."""
    global _limit
    _limit = count
    while len(_kept) > count:
        _kept.popitem(last=False)


def kept(resolved: Resolved, length: int, loop: Loop, images: Images | None) -> Planner | None:
    """A planner of the same model, training and rows, if one is kept."""
    if not _limit:
        return None
    key = planner_key(resolved, length, repr(loop), images)
    if key in _kept:
        _kept.move_to_end(key)
    return _kept.get(key)


def add(planner: Planner) -> None:
    """Keep one more, and let the one go that was used longest ago."""
    if _limit:
        _kept[planner_key(planner.resolved, planner.length, repr(planner.loop), planner.images)] = planner
        while len(_kept) > _limit:
            _kept.popitem(last=False)


def planner_key(resolved: Resolved, length: int, loop: str, images: Images | None) -> str:
    """What the traces and the contents of a planner depend on, as JSON. ``loop``: what tells loops apart."""
    values = resolved.recipe.model_dump(mode="json", exclude={*_VARIED, *_ELSEWHERE, "data"})
    for option in host_options():
        option.remove(values)
    # The rate and the decay's size change no memory; which weights decay, and the optimizer, do.
    optimizer = {key: value for key, value in values.pop("optimizer").items() if key not in ("lr", "max_grad_norm")}
    facts = {
        "recipe": values,
        "optimizer": optimizer,
        "data": [resolved.recipe.data.packing, resolved.recipe.data.format],
        "config": resolved.facts.config,
        "folder": str(resolved.facts.folder),
        "resolved": [resolved.device, resolved.blocks, vars(resolved.precision), resolved.base_storage,
                     str(resolved.stored), resolved.loss_kernel, resolved.recipe.strategy.wrap, *resolved.mesh.weights],
        "new tokens": resolved.recipe.tokenizer.model_dump(mode="json") if added_tokens(resolved.recipe) else None,
        "length": length,
        "loop": loop,
        "images": repr(images),
    }  # fmt: skip
    return json.dumps(facts, sort_keys=True, default=str)
