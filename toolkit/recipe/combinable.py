"""Which options the recipe's model, strategy and device can have together: one refusal, with what to set instead."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from toolkit.base_formats import asked_base
from toolkit.errors import InputError
from toolkit.layouts import Layout, layouts_of
from toolkit.recipe.compilable import why_not_compilable
from toolkit.recipe.fusable import why_not_fusable
from toolkit.recipe.model_facts import ModelFacts
from toolkit.recipe.packable import why_not_packable
from toolkit.recipe.quantisable import why_not_trainable
from toolkit.recipe.schema import Recipe
from toolkit.recipe.traits import Traits
from toolkit.rooms import ATTENTION, Option, active_options, asked_options
from toolkit.tasks import task_of


def check_combination(
    recipe: Recipe, facts: ModelFacts, traits: Traits, device: str, blocks: tuple[str, ...], source: str
) -> None:
    """Raise InputError for the first option that cannot be. ``blocks``: class names of the model's blocks."""
    _check_media(recipe, facts, source)
    assert recipe.model.attention is not None
    if recipe.data.packing and (reason := why_not_packable(facts, recipe.model.attention)):
        near = "data.packing: false" + ("" if recipe.data.streaming else ", with data.group_by_length: true")
        raise InputError(f"{source}: data.packing: {reason}; set {near}")
    active = [one for one in active_options(recipe) if not isinstance(one.option, Layout)]

    def check(options: Iterable[tuple[Option, Any]]) -> None:
        for option, settings in options:
            if reason := option.why_not(settings, recipe, facts, blocks, device):
                raise InputError(f"{source}: {option.key}: {reason}")

    check(one for one in active if one.option.key == ATTENTION)  # what follows depends on the attention
    if recipe.loss == "fused" and (reason := why_not_fusable(recipe, facts)):
        raise InputError(f"{source}: loss: fused {reason}; or set loss: plain")
    base, stored = asked_base(recipe, facts)
    if base is not None and (reason := base.why_not(stored, recipe, facts, blocks, device)):
        raise InputError(f"{source}: {base.key}: {reason}")
    if recipe.compile and (reason := why_not_compilable(recipe, blocks, traits)):
        raise InputError(f"{source}: compile: {reason}; or set compile: false")
    layouts = layouts_of(recipe.strategy.mesh)
    asked = [option for option, _ in asked_options(recipe) if not isinstance(option, Layout)]
    for layout, _ in layouts:
        if (odd := next((option for option in asked if layout.name not in option.axes), None)) is not None:
            raise InputError(f"{source}: {layout.key}: {odd.why_not_axis(layout.name)}")
    check(layouts)
    check(one for one in active if one.option.key != ATTENTION)
    if reason := why_not_trainable(facts):
        raise InputError(f"{source}: model.{'path' if recipe.model.path else 'config'}: {reason}")
    if base is not None and stored is not None and (reason := base.why_not_stored(recipe)):
        raise InputError(f"{source}: {reason}")


def _check_media(recipe: Recipe, facts: ModelFacts, source: str) -> None:
    media = task_of(recipe.model.task).media
    if media is not None and media.check is not None and facts.config is not None:
        try:
            media.check(facts.config)
        except InputError as error:
            raise InputError(f"{source}: {error}") from None
