"""Training loops that a plan can be made for: how each computes the loss of a micro-batch, traced as it runs.

Another loop keeps other copies of the logits, which are the peak of many runs: each takes 2 or 4 bytes for every token
and word of the vocabulary.
"""

from __future__ import annotations

from typing import Any

from toolkit.errors import InputError
from toolkit.layouts import Layout, layouts_of
from toolkit.optimizers import optimizer_kind
from toolkit.planning.loops.base import Loop, LoopPrecision
from toolkit.planning.loops.known import LOOPS
from toolkit.planning.loops.named import habits_of, loop_named
from toolkit.recipe.resolve import Resolved
from toolkit.rooms import ATTENTION, asked_options

__all__ = ["LOOPS", "Loop", "LoopPrecision", "check", "check_loop", "habits_of", "loop_named"]


def check_loop(name: str, resolved: Resolved) -> None:
    """Raise InputError if there is no such loop or habit, if it cannot train this recipe, or if plans do not count
    it."""
    loop = loop_named(name)
    if loop is not LOOPS["toolkit"]:
        check(loop, name, resolved)


def check(loop: Loop, name: str, resolved: Resolved) -> None:
    """Raise InputError, with the loop's ``name``, if it cannot train this recipe or if plans do not count it."""
    recipe = resolved.recipe
    without: list[tuple[str, Any, Any]] = [
        (option.key, settings, option.off_value)
        for option, settings in asked_options(recipe)
        if option.typed_key not in ("", ATTENTION)
        and not option.training_args(settings)
        and not isinstance(option, Layout)
    ]
    tool = name.split()[0].partition("@")[0]
    not_counted = loop.unknown | {option.key for option, _ in asked_options(recipe) if option.names(tool)}
    for key, value, default in (
        ("loss", recipe.loss, "plain"),
        *without,
        ("z_loss", recipe.z_loss, 0.0),
        ("label_smoothing", recipe.label_smoothing, 0),
    ):
        if value == default:
            continue
        given = key if default is None else f"{key}: {str(value).lower()}"
        plain = "null" if default is None else str(default).lower()
        unknown = f"plan does not know what memory {loop.title} takes for {given}"
        why = unknown if key in not_counted else f"{loop.title} has no {given}"
        raise InputError(f"--loop {name}: {why}; plan it with {key}={plain}")
    for layout, _ in layouts_of(resolved.mesh):
        raise InputError(f"--loop {name}: {loop.title} does not divide {layout.what}; plan it without {layout.key}")
    kind = optimizer_kind(recipe.optimizer.name)
    has = kind.trainer(recipe.optimizer) is not None if loop.optimizers is None else kind.name in loop.optimizers
    if not has:
        if kind.name in loop.namesakes:
            other = f"{loop.title}'s {kind.name} is another one, whose memory plan does not know"
            raise InputError(f"--loop {name}: {other}; plan it with optimizer.name=adamw")
        raise InputError(f"--loop {name}: {loop.title} has no optimizer that is the recipe's {kind.name}")
    own = recipe.strategy.name
    if loop.strategies and own not in loop.strategies:
        others = " or ".join(loop.strategies)
        raise InputError(f"--loop {name}: plan does not know {name} under {own}; plan it with strategy.name={others}")
    if why := loop.refuses(resolved):
        raise InputError(f"--loop {name}: {why}")
