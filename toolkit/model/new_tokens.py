"""``tokenizer.add_tokens`` and ``add_special_tokens``: tokens that the base model does not know, and the rows of its
embeddings that they get."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from toolkit.errors import InputError
from toolkit.model.sources import NotByPart, source_of
from toolkit.recipe.adapter_options import options_of
from toolkit.recipe.needs import NO_TOKENIZER
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Adapter, Recipe

ROWS = ("token_indices", "trainable_token_indices")
"""PEFT's fields for the rows of an embedding that train: of the method trainable-tokens, and of LoRA."""


@dataclass(frozen=True)
class NewTokens:
    """``ids``: of the added tokens, in order. ``rows``: that an embedding needs to have one for every token."""

    ids: tuple[int, ...]
    rows: int


def new_tokens(resolved: Resolved) -> NewTokens | None:
    """The recipe's new tokens; None if it adds none. Raises InputError if its tokenizer cannot be loaded.

    Without a tokenizer, as under `verify` and in plans of a model from ``model.config``, their ids follow those of the
    vocabulary.
    """
    recipe = resolved.recipe
    count = len(recipe.tokenizer.added)
    if not count:
        return None
    path = recipe.tokenizer.path or recipe.model.path
    if path not in (None, NO_TOKENIZER):
        return _in_tokenizer(recipe.model_dump_json(include={"model", "tokenizer"}))
    facts = resolved.facts
    size = facts.value("vocab_size") or facts.text.value("vocab_size")
    if not isinstance(size, int):
        raise InputError(f"{resolved.source}: tokenizer.add_tokens: needs a tokenizer; set tokenizer.path")
    return NewTokens(tuple(range(size, size + count)), size + count)


@lru_cache(maxsize=4)
def _in_tokenizer(sections: str) -> NewTokens:
    from toolkit.model.processor import load_processor

    recipe = Recipe.model_validate_json(sections[:-1] + ',"data":{"train":"none"}}')
    processor = load_processor(recipe)
    tokenizer = getattr(processor, "tokenizer", processor)
    ids = tokenizer.convert_tokens_to_ids(recipe.tokenizer.added)
    return NewTokens(tuple(ids), len(tokenizer))


def add_rows(model: Any, resolved: Resolved) -> None:
    """Give the embeddings of ``model`` a row for each new token; one that has enough rows stays as it is.

    New rows are drawn around the mean of the others, from ``run.seed`` (Hewitt, «Initializing New Word Embeddings for
    Pretrained Language Models», 2021, as transformers does it). Raises NotByPart if the weights are read by part, and
    InputError if resizing makes one weight of several: transformers 5.23.0 gives the encoder and the decoder of BART
    and its kin one table, whatever ``tie_word_embeddings`` says, and no host that loads the export does so.
    """
    tokens = new_tokens(resolved)
    if tokens is None or tokens.rows <= _rows_of(model):
        return
    if source_of(model.get_input_embeddings().weight) is not None:
        raise NotByPart("the rows of its new tokens are drawn around the mean of all others")
    torch.manual_seed(resolved.recipe.run.seed)
    empty = model.get_input_embeddings().weight.is_meta
    before = _shared(model)
    model.resize_token_embeddings(tokens.rows, mean_resizing=not empty)
    if made := _shared(model) - before:
        several = ", ".join(sorted(made)[0])
        raise InputError(
            f"{resolved.source}: tokenizer.add_tokens: transformers makes one weight of {several} when it adds "
            "rows, and whatever loads the exported model makes several, as its config has tie_word_embeddings: false; "
            "leave tokenizer.add_tokens out (the vocabulary of such a base has to be enlarged in its own files), or "
            "train a base with tie_word_embeddings: true"
        )


def _shared(model: nn.Module) -> set[tuple[str, ...]]:
    """Names of the parameters that are one weight, by weight."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return {tuple(names) for names in groups.values() if len(names) > 1}


def _rows_of(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


def trained_rows(adapter: Adapter, model: nn.Module, resolved: Resolved) -> dict[str, Any]:
    """Options of ``adapter`` with which PEFT trains the rows of the new tokens, in the input embedding and in a head
    with weights of its own, beside the rows that the recipe names. Empty if there are none.

    Raises InputError if the method cannot train them, unless the recipe trains the embeddings whole.
    """
    tokens = new_tokens(resolved)
    if tokens is None:
        return {}
    tables = [name for name in _tables(model) if name not in adapter.modules_to_save]
    if tables and (head := _tied_head(model)) in adapter.modules_to_save:
        raise InputError(
            f"{resolved.source}: tokenizer.add_tokens: adapter.modules_to_save trains {head}, whose weight is that of "
            f"{tables[0]}, and PEFT 0.21.2 then cannot train rows of it; set adapter.modules_to_save: [{tables[0]}], "
            f"or leave {head} out"
        )
    if not tables:
        return {}
    field = next((name for name in ROWS if name in options_of(adapter.method)), None)
    if field is None:
        raise InputError(
            f"{resolved.source}: tokenizer.add_tokens: under adapter.method: {adapter.method} the rows of new tokens "
            f"would stay as they are drawn; set adapter.modules_to_save: [{', '.join(_tables(model))}], or use lora, "
            "dora or qlora"
        )
    asked = adapter.options.get(field) or []
    if field == "token_indices":
        return {field: _union(asked, tokens.ids)}
    if not isinstance(asked, dict):
        asked = {_tables(model)[0]: asked} if asked else {}
    return {field: asked | {name: _union(asked.get(name, ()), tokens.ids) for name in tables}}


def _union(asked: Any, ids: tuple[int, ...]) -> list[int]:
    return list(dict.fromkeys((*asked, *ids)))


def _tables(model: Any) -> list[str]:
    """Last parts of the names of the input embedding, and of a head with weights of its own."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {id(module): name.rsplit(".", 1)[-1] for name, module in model.named_modules()}
    found = [names[id(embedding)]]
    if head is not None and head.weight is not embedding.weight and head.weight.shape[0] == embedding.weight.shape[0]:
        found.append(names[id(head)])
    return found


def _tied_head(model: Any) -> str | None:
    """The last part of the name of a head whose weight is the input embedding's."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or head is embedding or head.weight is not embedding.weight:
        return None
    return next(name.rsplit(".", 1)[-1] for name, module in model.named_modules() if module is head)


def check_trained(model: nn.Module, resolved: Resolved) -> None:
    """Raise InputError if ``model.freeze`` keeps the embeddings of new tokens as they are drawn."""
    if not resolved.recipe.tokenizer.added:
        return
    for name in _tables(model):
        module = next(module for full, module in model.named_modules() if full.rsplit(".", 1)[-1] == name)
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise InputError(
                f"{resolved.source}: tokenizer.add_tokens: the rows of new tokens in {name} would stay as they are "
                "drawn: model.freeze matches it"
            )
