"""Masked language modelling: which tokens of a sample are hidden, anew in each epoch, alike on any number of processes.

The rule is BERT's (arXiv:1810.04805, section 3.1): each token is chosen with a probability; of the chosen ones 80 %
become the mask token, 10 % a random token, and 10 % stay. At least one is chosen: every sample trains something.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from toolkit.errors import InputError
from toolkit.recipe.schema import Recipe
from toolkit.tasks import task_of
from toolkit.tasks.labels import IGNORED

if TYPE_CHECKING:
    from toolkit.data.formats import Example


@dataclass(frozen=True)
class Masking:
    """``probability``: of a token to be chosen. ``mask_id``: the mask token. Random tokens are below ``vocabulary``.
    ``seed``: the run's."""

    probability: float
    mask_id: int
    vocabulary: int
    seed: int

    def hide(self, example: Example, epoch: int, number: int) -> Example:
        """``example``, whose labels are the ids that may be hidden, with some hidden and only these labelled: a matter
        of the seed, the epoch and the sample's ``number`` alone."""
        assert not isinstance(example.labels, int)
        draw = random.Random(f"{self.seed} {epoch} {number}")
        free = [at for at, label in enumerate(example.labels) if label != IGNORED]
        chosen = [at for at in free if draw.random() < self.probability]
        if not chosen and free:
            chosen = [draw.choice(free)]
        ids, labels = list(example.input_ids), [IGNORED] * len(example.labels)
        for at in chosen:
            labels[at] = example.labels[at]
            how = draw.random()
            if how < 0.8:
                ids[at] = self.mask_id
            elif how < 0.9:
                ids[at] = draw.randrange(self.vocabulary)
        return replace(example, input_ids=ids, labels=labels)


def masking_of(recipe: Recipe, tokenizer: Any) -> Masking | None:
    """How the recipe's task hides tokens; None if it does not. Raises InputError if the tokenizer has no mask token."""
    if not task_of(recipe.model.task).masks:
        return None
    if tokenizer.mask_token_id is None:
        raise InputError.at(None, "tokenizer.path", f"{recipe.model.task} needs a tokenizer with a mask token")
    return Masking(recipe.data.mask_probability, tokenizer.mask_token_id, len(tokenizer), recipe.run.seed)
