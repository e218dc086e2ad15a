"""How long rows may be for a model: the one answer for every command, without torch.

What holds the positions decides. A table (a learned embedding, or values that are computed once) ends: a longer row is
an index out of range. Rotations do not end, but a model has learned no distance beyond those that it was made for.
``position_tables.py`` reads from a model's code which it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.recipe.adapter_methods import METHODS
from toolkit.recipe.model_facts import UNKNOWN, ModelFacts, config_name, model_sources
from toolkit.recipe.position_tables import Table, position_code
from toolkit.recipe.resolve import Decisions
from toolkit.recipe.schema import Recipe
from toolkit.tasks import task_of
from toolkit.tasks.labels import Labels


@dataclass(frozen=True)
class Limit:
    """``tokens``: of the longest row that fits. ``key``: of the config, with ``rows``, its value. ``ends``: whether
    positions are a table; otherwise they are rotations. ``less``: why fewer tokens than rows fit."""

    tokens: int
    key: str
    rows: int
    ends: bool
    less: str = ""

    def __str__(self) -> str:
        """For a message: «the model's 128 positions (max_position_embeddings: 130, of which ...)»."""
        value = f"{self.key}: {self.rows:,}{self.less}" if self.less else self.key
        return f"the model's {self.tokens:,} positions ({value})"


@dataclass(frozen=True)
class Limits:
    """Of what a model reads (``rows``) and of what a decoder behind an encoder writes (``targets``); None: unlimited,
    or not known."""

    rows: Limit | None = None
    targets: Limit | None = None
    window: tuple[int, str] | None = None
    """Tokens of the window that every layer attends in, and the config's key; None where some layer attends to all."""


def limits_of(recipe: Recipe, facts: ModelFacts) -> Limits:
    """The limits of the recipe's model for its task, with what an adapter and the mesh take of them."""
    task = task_of(recipe.model.task)
    if facts.config is None or (task.media is not None and not task.media.tokens and task.labels is not Labels.TARGET):
        return Limits()
    decodes = task.labels is Labels.TARGET
    rows: list[Limit] = []
    targets: list[Limit] = []
    windows = []
    for part in _text_parts(facts):
        windows.append(_window(part))
        for table, limit in _tables(part):
            side = part.side or next((name for name in ("decoder", "encoder") if name in table.owner.lower()), None)
            rows += [limit] if side != "decoder" or not decodes else []
            targets += [limit] if side != "encoder" and decodes else []
        if not rows and part.side != "decoder" and (rotated := _rotated(part)) is not None:
            rows.append(rotated)
    if task.media is not None and not task.media.tokens:
        rows = []  # a recording's positions are not tokens
    return Limits(_taken(_least(rows), recipe), _least(targets), windows[0] if len(windows) == 1 else None)


def _least(limits: list[Limit]) -> Limit | None:
    return min(limits, key=lambda limit: limit.tokens, default=None)


@dataclass(frozen=True)
class _Part:
    """A part of a model that reads or writes text. ``side``: where encoder and decoder are models of their own."""

    facts: ModelFacts
    sources: list[Path]
    side: str | None = None

    def value(self, key: str) -> Any:
        return value_of(self.facts, key)


def _text_parts(facts: ModelFacts) -> list[_Part]:
    config = facts.config or {}

    def nested(name: str, side: str | None = None) -> _Part:
        part = ModelFacts(dict(config[name]), None)
        # Code that comes with a model is one folder's, whatever its parts are called.
        return _Part(part, model_sources(facts if config.get("auto_map") else part), side)

    if isinstance(config.get("text_config"), Mapping):
        return [nested("text_config")]
    sides = ("encoder", "decoder")
    if all(isinstance(config.get(side), Mapping) and "model_type" in config[side] for side in sides):
        return [nested(side, side) for side in sides]
    return [_Part(facts, model_sources(facts))]


def _tables(part: _Part) -> list[tuple[Table, Limit]]:
    """The tables that the model of this config has, and how many tokens each holds."""
    found = []
    for source in part.sources:
        for table in position_code(source).tables:
            size = part.value(table.key)
            if not _is_count(size) or not all(condition.met(part.value) for condition in table.conditions):
                continue
            padding = part.value("pad_token_id")
            before = padding + 1 if table.behind_padding and isinstance(padding, int) else 0
            less = f", less the first {before}, up to the padding token's id" if before else ""
            name = config_name(part.facts, table.key)
            found.append((table, Limit(size - before, name, size, ends=True, less=less)))
    return found


def _rotated(part: _Part) -> Limit | None:
    """What a model without a table was made for, where its positions are rotations, or its code is not known."""
    if part.sources and not any(position_code(source).rotates for source in part.sources):
        return None  # relative distances, a recurrence, or none at all: the config's number limits nothing
    for key in ("max_position_embeddings", "n_positions", "max_seq_len"):
        if _is_count(size := part.value(key)):
            return Limit(size, config_name(part.facts, key), size, ends=False)
    return None


def _window(part: _Part) -> tuple[int, str] | None:
    size, types = part.value("sliding_window"), part.value("layer_types")
    if not _is_count(size) or part.value("use_sliding_window") is False:
        return None
    texts = [source.read_text(encoding="utf-8") for source in part.sources]
    if any("layer_types" in text for text in texts):
        if not isinstance(types, list):
            # Qwen's classes make the list of the two; those of other families alternate.
            slides = part.value("use_sliding_window") is True and part.value("max_window_layers") == 0
        else:
            slides = bool(types) and set(types) == {"sliding_attention"}
    else:
        slides = any(_ALL_SLIDE.search(text) for text in texts)
    return (size, config_name(part.facts, "sliding_window")) if slides else None


_ALL_SLIDE = re.compile(
    r"create_causal_mask\s+if\s+(?:self\.)?config\.sliding_window\s+is\s+None\s+else\s+create_sliding_window_causal_mask"
)
"""One mask for all layers, in transformers' code."""


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def value_of(facts: ModelFacts, key: str) -> Any:
    """A key of the config under any of its names, or its class's default; None where there is neither."""
    value = facts.value(key)
    return None if value is UNKNOWN else value


def _taken(limit: Limit | None, recipe: Recipe) -> Limit | None:
    """``limit`` without the positions that an adapter's virtual tokens take, and so that rows that are padded for the
    ranks of ``strategy.mesh.context`` still fit."""
    if limit is None or not limit.ends:
        return limit
    tokens, less = limit.tokens, limit.less
    if virtual := virtual_tokens(recipe):
        tokens, less = tokens - virtual, f"{less}, less {virtual:,} virtual tokens of {_method(recipe)}"
    ranks = 1 if recipe.strategy.mesh is None else recipe.strategy.mesh.context
    if over := tokens % ranks:
        tokens, less = tokens - over, f"{less}, as a multiple of {ranks} ranks (strategy.mesh.context)"
    return Limit(tokens, limit.key, limit.rows, limit.ends, less)


def virtual_tokens(recipe: Recipe) -> int:
    """Tokens that the adapter puts in front of every row."""
    if recipe.adapter is None or METHODS[recipe.adapter.method].prompt is None:
        return 0
    count = recipe.adapter.options.get("num_virtual_tokens", 0)
    return count if _is_count(count) else 0


def _method(recipe: Recipe) -> str:
    return "none" if recipe.adapter is None else recipe.adapter.method


def with_length(recipe: Recipe, facts: ModelFacts, decide: Decisions) -> Recipe:
    """``recipe``, whose rows are no longer than a table of positions where it does not ask for a length."""
    limit = limits_of(recipe, facts).rows
    if "max_length" in recipe.data.model_fields_set or limit is None or not limit.ends:
        return recipe
    if limit.tokens < 2 or recipe.data.max_length <= limit.tokens:
        return recipe
    length = decide("data.max_length", limit.tokens, f"{limit}, since the recipe sets no length")
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"max_length": length})})


def length_problem(recipe: Recipe, limits: Limits) -> str | None:
    """Why rows of ``data.max_length`` cannot be, and what to set; None where they can. Packed rows may be longer than a
    table: each of their samples has positions of its own."""
    limit, length = limits.rows, recipe.data.max_length
    if limit is None or not limit.ends or length <= limit.tokens or recipe.data.packing:
        return None
    if limit.tokens < 2:
        return f"{limit} leave no room for a row; lower adapter.options num_virtual_tokens, or use lora"
    return f"{length:,} tokens are more than {limit}; set data.max_length: {limit.tokens} or less, or leave it out"


def length_notes(recipe: Recipe, limits: Limits) -> list[str]:
    """What a user should know of a length that can be."""
    limit, length = limits.rows, recipe.data.max_length
    notes = []
    if limits.window is not None and length > limits.window[0]:
        size, key = limits.window
        notes.append(
            f"data.max_length: {length:,} tokens are more than the sliding window of {size:,} that every layer attends "
            f"in ({key}): no token attends to one further back"
        )
    if limit is None or limit.ends or length <= limit.tokens:
        return notes
    return [
        *notes,
        f"data.max_length: {length:,} tokens are more than the {limit.tokens:,} that the model was made for "
        f"({limit.key}); its positions are rotations, so longer rows compute, at distances that it has not learned",
    ]
