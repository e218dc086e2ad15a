"""The token that a classifier of texts reads them at, where its model looks for one."""

from __future__ import annotations

from toolkit.recipe.limits import value_of
from toolkit.recipe.model_facts import ModelFacts, model_sources
from toolkit.recipe.schema import Recipe
from toolkit.tasks import task_of
from toolkit.tasks.labels import Labels

_SAME_NUMBER = "same number of <eos> tokens"
"""In the message of transformers' encoder-decoders (BART, mBART, T5): of the rows of a batch, each has to have one at
least, and all as many (5.23.0)."""


def pooled_token(recipe: Recipe, facts: ModelFacts) -> int | None:
    """The end-of-sequence token (the config's ``eos_token_id``) whose hidden state the model takes for a whole text;
    None for other tasks, and for models that find the end of a row otherwise."""
    task = task_of(recipe.model.task)
    if task.labels is not Labels.SAMPLE or task.media is not None:
        return None
    sources = model_sources(facts)
    if not any(_SAME_NUMBER in source.read_text(encoding="utf-8") for source in sources):
        return None
    token = value_of(facts, "eos_token_id")
    return token if isinstance(token, int) else None
