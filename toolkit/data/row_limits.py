"""What one sample must not exceed: positions, and rows of the embeddings. An index beyond a table is an error in the
middle of a run; on a GPU one without a line number.

A sample is checked when it is tokenised, by the model's config, and all of them before the first step, by the model
itself (``toolkit/training/preflight.py``), since tokens may come from the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from toolkit.recipe.limits import Limit, limits_of
from toolkit.recipe.model_facts import ModelFacts
from toolkit.recipe.pooling import pooled_token
from toolkit.recipe.preflight import embedding_rows, id_problem
from toolkit.recipe.schema import Recipe
from toolkit.recipe.tokenizer_facts import added_tokens
from toolkit.tasks import task_of
from toolkit.tasks.labels import IGNORED, Labels

if TYPE_CHECKING:
    from toolkit.data.formats import Example


@dataclass(frozen=True)
class RowLimits:
    """``ids``: rows of the embedding that reads tokens; ``written``: of the one that a decoder behind an encoder writes
    with. ``rows`` and ``targets``: positions of a row and of such a decoder. None: unlimited, or not known. ``pooled``:
    the token that each row must have, where there is one."""

    ids: int | None = None
    written: int | None = None
    rows: Limit | None = None
    targets: Limit | None = None
    pooled: int | None = None

    @classmethod
    def of(cls, recipe: Recipe, facts: ModelFacts, *, ids: int | None = None, written: int | None = None) -> RowLimits:
        """By a config. ``ids`` and ``written``: as the model has them, where there is one."""
        task, limits = task_of(recipe.model.task), limits_of(recipe, facts)
        if ids is None and not added_tokens(recipe) and (task.media is None or task.media.tokens):
            ids = embedding_rows(facts)
        rows = limits.rows if limits.rows is not None and limits.rows.ends else None
        targets = limits.targets if task.labels is Labels.TARGET else None
        return cls(ids, written, rows, targets, pooled_token(recipe, facts))

    def problem(self, example: Example, name_of: Callable[[int], str]) -> str | None:
        """Why the model cannot take a sample, and what to do; None where it can. ``name_of``: the token of an id."""
        labels = [] if isinstance(example.labels, int) else example.labels
        if self.rows is not None and len(example.input_ids) > self.rows.tokens:
            return (
                f"{len(example.input_ids):,} tokens are more than {self.rows}; remove this sample, or set "
                f"data.max_length: {self.rows.tokens}"
            )
        if self.targets is not None and len(labels) > self.targets.tokens:
            return (
                f"{len(labels):,} tokens, but the decoder has {self.targets.tokens:,} positions ({self.targets.key}); "
                f"remove this sample, or set data.max_length: {self.targets.tokens}"
            )
        if self.pooled is not None and self.pooled not in example.input_ids:
            return (
                f"the sample does not have the token {self.pooled} ({name_of(self.pooled)!r}; eos_token_id in the "
                "model's config), whose hidden state the model classifies; use the model's own tokenizer"
            )
        for ids, rows in ((example.input_ids, self.ids), (labels, self.written)):
            if rows is None or not ids:
                continue
            outside = next((one for one in ids if one >= rows or (one < 0 and one != IGNORED)), None)
            if outside is not None:
                return id_problem(f"token {name_of(outside)!r} has the id {outside:,}", rows)
        return None
