"""What cannot train, as far as a recipe, its model's config and its tokenizer's files show: no torch, no data.

Every command asks this one function, so that they refuse the same with the same words. What needs the data and the
model is checked before the first step (``toolkit/training/preflight.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.errors import InputError
from toolkit.recipe.limits import length_notes, length_problem, limits_of, value_of
from toolkit.recipe.model_facts import ModelFacts, model_sources
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.recipe.tokenizer_facts import added_tokens, special_ids
from toolkit.tasks import task_of
from toolkit.tasks.labels import Labels


@dataclass(frozen=True)
class Check:
    """One thing that was checked. ``value`` is what the recipe or the data has, ``limit`` what the model takes; None:
    unlimited, or not known. ``problem``: why it cannot train, and what to do; it is about ``key`` of the recipe."""

    claim: str
    value: Any
    limit: Any
    key: str = ""
    problem: str | None = None
    place: str | None = None
    """Of the row that shows it; None: where the recipe has ``key``."""

    @property
    def ok(self) -> bool:
        return self.problem is None

    def to_json(self) -> dict[str, Any]:
        """For the command's JSON."""
        found = {"claim": self.claim, "value": self.value, "limit": self.limit, "ok": self.ok}
        return found if self.ok else found | {"key": self.key, "problem": self.problem}


def known_checks(resolved: Resolved) -> list[Check]:
    """What is known without torch and without data."""
    recipe = resolved.recipe
    limits = limits_of(recipe, resolved.facts)
    longest = None if limits.rows is None else limits.rows.tokens
    checks = [
        Check(
            "data.max_length within the model's positions",
            recipe.data.max_length,
            longest,
            "data.max_length",
            length_problem(recipe, limits),
        )
    ]
    if (attention := recipe.model.attention or "").startswith("flash_attention"):
        alone = f"{attention} has kernels of 16 bits alone; set precision: bf16 or fp16, or model.attention: sdpa"
        fp32 = recipe.precision == "fp32"
        checks.append(Check("a dtype of the attention's kernels", recipe.precision, "16 bits", "model.attention",
                            alone if fp32 else None))  # fmt: skip
    if any(_ONE_LENGTH in source.read_text(encoding="utf-8") for source in model_sources(resolved.facts)):
        one_length = (
            "this model trains rows of a fixed length alone, a multiple of its chunks and as long as its axial "
            "positions (transformers: «If training, sequence length ... has to be a multiple of ...»), and rows here "
            "are as long as the longest sample in them; use another model"
        )
        checks.append(
            Check("rows of any length", None, None, "model.config" if recipe.model.config else "model.path", one_length)
        )
    task, config = task_of(recipe.model.task), resolved.facts.config
    if task.labels is Labels.TARGET and config is not None and not config.get("auto_map"):
        encodes = resolved.facts.value("is_encoder_decoder") is True or "decoder" in config
        without = f"{resolved.facts.model_type} has no decoder behind an encoder, which model.task: {task.name} trains"
        checks.append(Check("a decoder behind an encoder", encodes, True, "model.task", None if encodes else without))
    rows = embedding_rows(resolved.facts)
    media = task.media
    if rows is not None and not added_tokens(recipe) and (media is None or media.tokens):
        for role, (token, number) in special_ids(recipe).items():
            checks.append(
                Check(
                    f"id of the tokenizer's {role} within the embedding",
                    number,
                    rows - 1,
                    "tokenizer.options" if role in recipe.tokenizer.options else _tokenizer_key(resolved),
                    None if number < rows else id_problem(f"{role} {token!r} has the id {number:,}", rows),
                )
            )
    return checks


_ONE_LENGTH = "If training, sequence length"
"""In a message of transformers' Reformer (5.23.0)."""


def with_classes(recipe: Recipe, count: int | None) -> Recipe:
    """``recipe`` with the model's number of classes, which labels are checked against, where it does not say it."""
    if count is None or not task_of(recipe.model.task).classes or recipe.model.num_labels is not None:
        return recipe
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"num_labels": int(count)})})


def id_problem(what: str, rows: int) -> str:
    """The message for a token id that has no row of the embedding."""
    return (
        f"{what}, and the model's embedding has {rows:,} rows (vocab_size); set tokenizer.path to the model's own "
        "tokenizer, or list the tokens that are new to the model in tokenizer.add_tokens, which adds rows"
    )


def _tokenizer_key(resolved: Resolved) -> str:
    return "tokenizer.path" if resolved.recipe.tokenizer.path else "model.path"


def embedding_rows(facts: ModelFacts) -> int | None:
    """Rows of the input embedding of text by the config; None where it does not say."""
    rows = (value_of(part, "vocab_size") for part in (facts.text, facts))
    return next((one for one in rows if isinstance(one, int) and not isinstance(one, bool)), None)


def check_known(resolved: Resolved) -> list[str]:
    """Notes for the user. Raises InputError with all that cannot train."""
    refuse(known_checks(resolved), resolved)
    return known_notes(resolved)


def known_notes(resolved: Resolved) -> list[str]:
    """What a user should know of values that can train."""
    made = [f"{one.key}: set to {one.value:,}: {one.reason}" for one in resolved.decisions if one.key in _NOTED]
    strategy = resolved.recipe.strategy
    if not strategy.reshard_after_forward and not hasattr(resolved.settings, "reshard"):
        made.append(f"strategy.reshard_after_forward: false changes nothing under {strategy.name}")
    made += slow_adapter_notes(resolved) + dropped_layer_notes(resolved)
    return made + length_notes(resolved.recipe, limits_of(resolved.recipe, resolved.facts))


def dropped_layer_notes(resolved: Resolved) -> list[str]:
    """A note where layers that a model leaves out at random are kept (``model/load.py: keep_layers``)."""
    config = resolved.facts.config or {}
    nested = [
        ModelFacts(dict(one), None) for one in config.values() if isinstance(one, Mapping) and "model_type" in one
    ]
    found = [(key, part.value(key)) for part in (resolved.facts, *nested) for key in LAYERDROPS]
    shares = [f"{key}: {share:g}" for key, share in found if isinstance(share, int | float) and share > 0]
    if resolved.world_size == 1 or not shares:
        return []
    return [
        f"model: {', '.join(shares)} in its config is taken for 0: each of {resolved.world_size} processes would leave "
        "out other layers, and wait for what the others exchange in theirs"
    ]


LAYERDROPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "speech_encoder_layerdrop")
"""Keys of configs with the share of layers that a forward in training leaves out."""


def slow_adapter_notes(resolved: Resolved) -> list[str]:
    """A note where LoRA in 16 bits on a CPU learns much more slowly than in float32 (measured: docs/how-to/
    choose-a-peft-method.md)."""
    recipe = resolved.recipe
    if (
        resolved.device != "cpu"
        or recipe.adapter is None
        or recipe.adapter.method != "lora"
        or resolved.precision.compute == "float32"
        or recipe.optimizer.lr >= _ENOUGH_FOR_16_BITS
    ):
        return []
    return [
        f"precision: {recipe.precision}: LoRA in 16 bits on a CPU learns much more slowly than in fp32 at a learning "
        f"rate as small as {recipe.optimizer.lr:g}; set precision: fp32"
    ]


_ENOUGH_FOR_16_BITS = 1e-4
"""Between 2e-5, where bf16 learned a quarter of what fp32 did, and 2e-4, where it learned nearly all of it."""

_NOTED = ("data.max_length",)
"""Derived values that change what is trained, so that nobody should have to ask for them."""


def refuse(checks: Iterable[Check], resolved: Resolved) -> None:
    """Raise InputError with every problem."""
    if problems := problems_of(checks, resolved):
        raise InputError(*problems)


def problems_of(checks: Iterable[Check], resolved: Resolved) -> list[str]:
    """Every problem once, each at the place of its row, or where the recipe has its key."""
    problems = [
        f"{check.place or resolved.recipe.written(check.key, resolved.source)}: {check.key}: {check.problem}"
        for check in checks
        if not check.ok
    ]
    return [*dict.fromkeys(problems)]
