"""Which options the recipe's model, strategy and device can have together: one refusal, with what to set instead."""

from __future__ import annotations

from toolkit.errors import InputError
from toolkit.layouts import Layout, layouts_of
from toolkit.recipe.compilable import why_not_compilable
from toolkit.recipe.fusable import why_not_fusable
from toolkit.recipe.model_facts import ModelFacts
from toolkit.recipe.packable import why_not_packable
from toolkit.recipe.quantisable import stored_base, why_not_on_packed, why_not_quantisable, why_not_trainable
from toolkit.recipe.schema import Recipe
from toolkit.recipe.traits import Traits
from toolkit.recipe.varlenable import VARLEN, why_not_varlen
from toolkit.rooms import asked_options
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
    if recipe.model.attention == VARLEN and (reason := why_not_varlen(recipe, facts, device)):
        raise InputError(f"{source}: model.attention: varlen {reason}")
    if recipe.loss == "fused" and (reason := why_not_fusable(recipe, facts)):
        raise InputError(f"{source}: loss: fused {reason}; or set loss: plain")
    if recipe.adapter is not None and recipe.adapter.method == "qlora" and (reason := why_not_quantisable(facts)):
        raise InputError(f"{source}: adapter.method: qlora {reason}; use lora")
    if recipe.compile and (reason := why_not_compilable(recipe, blocks, traits)):
        raise InputError(f"{source}: compile: {reason}; or set compile: false")
    layouts = layouts_of(recipe.strategy.mesh)
    options = [one for one in asked_options(recipe) if not isinstance(one.option, Layout)]
    for layout, _ in layouts:
        if (odd := next((option for option, _ in options if layout.name not in option.axes), None)) is not None:
            raise InputError(f"{source}: {layout.key}: {odd.why_not_axis(layout.name)}")
    for option, settings in (*layouts, *options):
        if reason := option.why_not(settings, recipe, facts, blocks, device):
            raise InputError(f"{source}: {option.key}: {reason}")
    if reason := why_not_trainable(facts):
        raise InputError(f"{source}: model.{'path' if recipe.model.path else 'config'}: {reason}")
    stored = stored_base(facts)
    if stored is not None and (reason := why_not_on_packed(recipe.adapter, recipe.model.path is not None)):
        raise InputError(f"{source}: {reason}")


def _check_media(recipe: Recipe, facts: ModelFacts, source: str) -> None:
    media = task_of(recipe.model.task).media
    if media is not None and media.check is not None and facts.config is not None:
        try:
            media.check(facts.config)
        except InputError as error:
            raise InputError(f"{source}: {error}") from None
