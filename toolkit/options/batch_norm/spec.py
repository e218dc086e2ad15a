"""``model.batch_norm``: which rows batch normalisation takes its statistics from, in every model that has it."""

from __future__ import annotations

from toolkit.recipe.model_facts import ModelFacts, has_batch_norm
from toolkit.recipe.schema import Recipe
from toolkit.rooms import Option
from toolkit.tasks import task_of


class BatchNormalisation(Option):
    name = "batch_norm"
    title = "batch normalisation over the rows of all ranks, of each rank, or by its running statistics"
    typed_key = "model.batch_norm"
    by_model = True
    axes = frozenset({"context", "tensor", "pipeline", "expert"})
    claim = None
    missing = ""
    before_adapters = True

    def settings(self, recipe: Recipe) -> str:
        """The mode: what is asked for, or the default."""
        return recipe.model.batch_norm or ("frozen" if _why_frozen(recipe) else "synchronised")

    def why_not(
        self, settings: str, recipe: Recipe, facts: ModelFacts, blocks: tuple[str, ...], device: str
    ) -> str | None:
        why = _why_frozen(recipe)
        return f"{settings}: {why}; remove the key, or set frozen" if why and settings != "frozen" else None

    def explained(self, settings: str, recipe: Recipe, facts: ModelFacts) -> tuple[str, str] | None:
        if recipe.model.batch_norm is not None or not has_batch_norm(facts):
            return None
        return settings, _why_frozen(recipe) or "one micro-batch of all ranks together, as the full batch computes it"


def _why_frozen(recipe: Recipe) -> str | None:
    """Why running statistics have to stay as they are; None if they need not."""
    media = task_of(recipe.model.task).media
    if recipe.adapter is not None:
        return "an adapter is saved without the base's statistics"
    if media is not None and media.in_text is not None:
        return "micro-batches without an image compute a blank one, which no statistic may hold"
    return None
