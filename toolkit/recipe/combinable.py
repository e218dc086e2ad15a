"""Which options the recipe's model, strategy and device can have together: one refusal, with what to set instead."""

from __future__ import annotations

from collections.abc import Iterable

from toolkit.base_formats import asked_base
from toolkit.errors import InputError
from toolkit.recipe.compilable import why_not_compilable
from toolkit.recipe.contextable import why_not_divisible
from toolkit.recipe.expertable import why_no_experts
from toolkit.recipe.fusable import why_not_fusable
from toolkit.recipe.model_facts import ModelFacts
from toolkit.recipe.packable import why_not_packable
from toolkit.recipe.quantisable import why_not_trainable
from toolkit.recipe.schema import Recipe
from toolkit.recipe.splittable import why_not_splittable
from toolkit.recipe.stageable import why_not_stageable
from toolkit.recipe.traits import Traits
from toolkit.rooms import ATTENTION, Asked, active_options, asked_options
from toolkit.tasks import task_of

AXES = ("context", "tensor", "pipeline", "expert")


def check_combination(
    recipe: Recipe, facts: ModelFacts, traits: Traits, device: str, blocks: tuple[str, ...], source: str
) -> None:
    """Raise InputError for the first option that cannot be. ``blocks``: class names of the model's blocks."""
    _check_media(recipe, facts, source)
    assert recipe.model.attention is not None
    if recipe.data.packing and (reason := why_not_packable(facts, recipe.model.attention)):
        near = "data.packing: false" + ("" if recipe.data.streaming else ", with data.group_by_length: true")
        raise InputError(f"{source}: data.packing: {reason}; set {near}")
    active = active_options(recipe)

    def check(options: Iterable[Asked]) -> None:
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
    mesh = recipe.strategy.mesh
    for axis in AXES if mesh is not None else ():
        odd = next((one.option for one in asked_options(recipe) if axis not in one.option.axes), None)
        if odd is not None and getattr(mesh, axis) > 1:
            raise InputError(f"{source}: strategy.mesh.{axis}: {odd.why_not_axis(axis)}")
    if mesh is not None and mesh.context > 1 and (reason := why_not_divisible(recipe, facts)):
        raise InputError(f"{source}: strategy.mesh.context: {reason}")
    if mesh is not None and mesh.tensor > 1 and (reason := why_not_splittable(recipe, facts)):
        raise InputError(f"{source}: strategy.mesh.tensor: {reason}")
    if mesh is not None and mesh.pipeline > 1 and (reason := why_not_stageable(recipe, facts, traits)):
        raise InputError(f"{source}: strategy.mesh.pipeline: {reason}")
    if mesh is not None and mesh.expert > 1 and (reason := why_no_experts(recipe, facts)):
        raise InputError(f"{source}: strategy.mesh.expert: {reason}")
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
