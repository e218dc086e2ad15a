"""Which token pads the rows of a classifier, so that its model pools at the last real token of each.

A language model with one label per sample pools at the last token that is not the padding token of its config, whatever
the attention mask says (transformers 5.23.0, ``GenericForSequenceClassification``). Rows have to be padded with that
token, and no sample may end with it: where it is the end-of-sequence token, which ends every sample, the model would
pool one token too early; where there is none, it takes one row at a time. The tokenizer that samples are made with, the
model's config and the exported folder get the token that is chosen here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from toolkit.recipe.limits import value_of
from toolkit.recipe.model_facts import model_facts
from toolkit.recipe.schema import Recipe
from toolkit.tasks import task_of
from toolkit.tasks.labels import Labels

_CHOSEN: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""By tokenizer, why it pads with another token than its files say."""


def pools_by_padding(recipe: Recipe) -> bool:
    """Whether the recipe's task has one label for each text."""
    task = task_of(recipe.model.task)
    return task.labels is Labels.SAMPLE and task.media is None


def choose_padding(tokenizer: Any, recipe: Recipe) -> None:
    """Have a classifier's ``tokenizer`` pad on the right, as the rows of a run are, with a token that ends no sample,
    in place of none or of end-of-sequence. It stays as it is where it has no such token: the preflight says so."""
    if not pools_by_padding(recipe):
        return
    tokenizer.padding_side = "right"
    own, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    told = _of_config(recipe)
    if told is not None and told != end and told != own and _is_token(tokenizer, told):
        why = f"the model's config has pad_token_id {told}"
    elif own is not None and own != end:
        return
    else:
        told = next(_others(tokenizer), None)
        why = "the tokenizer has no padding token" if own is None else "its padding token ends every sample"
    if told is None:
        return
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(told)
    _CHOSEN[tokenizer] = (
        f"tokenizer: rows are padded with {tokenizer.pad_token!r}, since {why}, and the model pools at the last token "
        "that is no padding"
    )


def padding_note(tokenizer: Any) -> str | None:
    """Why a tokenizer pads with another token than its files say; None where it does not."""
    return _CHOSEN.get(tokenizer) if tokenizer is not None else None


def _of_config(recipe: Recipe) -> int | None:
    token = value_of(model_facts(recipe.model), "pad_token_id")
    return token if isinstance(token, int) and not isinstance(token, bool) else None


def _is_token(tokenizer: Any, token: int) -> bool:
    return 0 <= token < len(tokenizer) and tokenizer.convert_ids_to_tokens(token) is not None


def _others(tokenizer: Any) -> Iterator[int]:
    """Special tokens that may pad, the likeliest to be at no sample's end first: bos begins samples."""
    for token in (tokenizer.bos_token_id, tokenizer.unk_token_id, *tokenizer.all_special_ids):
        if token is not None and token not in (tokenizer.eos_token_id, tokenizer.sep_token_id):
            yield token
