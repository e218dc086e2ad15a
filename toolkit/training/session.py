"""Build an engine from a resolved recipe, and check that its strategy is active."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from toolkit.layouts import layouts_of
from toolkit.model.built import Built
from toolkit.model.freezing import Frozen
from toolkit.model.packed_layers import weight_count
from toolkit.model.processor import load_processor, pad_token_of
from toolkit.recipe.preflight import with_classes
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.rooms import asked_options, shadowing_options
from toolkit.strategies import strategy_of
from toolkit.strategies.engines.base import Engine
from toolkit.strategies.engines.claims import Claim, NotActive
from toolkit.strategies.engines.connect import make_accelerator
from toolkit.strategies.engines.prepared import Prepared
from toolkit.strategies.engines.process_group import allow_hours
from toolkit.training.group_norms import GroupNorms
from toolkit.training.preparation import prepare_model
from toolkit.training.shadow import ShadowWeights

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedTokenizerBase


@dataclass
class Session:
    """The objects of a run."""

    resolved: Resolved
    tokenizer: PreTrainedTokenizerBase | None
    """None if the samples need no tokenizer, as under `verify`."""
    accelerator: Accelerator
    engine: Engine
    claims: list[Claim]
    weights: int
    """Parameters of the whole model, frozen ones included."""
    built: Built
    """The whole model's config and embeddings, which samples are checked against before the first step."""
    unreached: list[str] = field(default_factory=list)
    """Weights that no output depends on, and that are not trained for that."""
    shadows: dict[str, ShadowWeights] = field(default_factory=dict)
    """Weights that options keep beside those that train, by the option's name."""
    frozen: list[Frozen] = field(default_factory=list)
    """What each pattern of ``model.freeze`` has frozen."""
    loaded_whole: str | None = None
    """Why every process loaded the whole model although it keeps a part; None where each read its part."""
    rows: list[dict[str, Any]] | None = None
    """Fingerprints of the rows of ``data.train``, by source: see ``data/fingerprint.py``."""
    folders: dict[str, str] = field(default_factory=dict)
    """And of the folders that the recipe names, by key: ``launch/identity.py``."""
    label_names: list[str] | None = None
    """The classes' names in order, where the data names them: exported with the model."""

    notes: list[str] = field(default_factory=list)
    """What the recipe's adapter is on, where the recipe does not say it in so many words."""

    group_norms: GroupNorms | None = None
    """``run.group_norms``: the norms of each group of parameters."""
    shared_disk: bool | None = None
    """Whether every process sees the folder that rank 0 writes checkpoints to; None before the first."""

    @property
    def data_recipe(self) -> Recipe:
        """The recipe with the model's number of classes, which labels are checked against."""
        config: Any = self.engine.config
        return with_classes(self.resolved.recipe, getattr(config, "num_labels", None))

    @property
    def data_rank(self) -> int:
        """This process's data-parallel rank: which samples of each window it gets."""
        return self.resolved.data_rank(self.rank)

    @property
    def rank(self) -> int:
        """This process among all of them."""
        return int(self.accelerator.process_index)

    @property
    def token_rank(self) -> int:
        """Which part of each window's tokens this process computes."""
        return self.resolved.token_rank(self.rank)

    @property
    def mask_rank(self) -> int:
        """Which dropout masks this process draws: those of its tokens, and of its blocks."""
        return self.token_rank + self.resolved.mesh.stage(self.rank) * self.resolved.token_parts


def open_session(resolved: Resolved, *, own_padding: bool = False, **accelerator_options: Any) -> Session:
    """Connect, load, build the engine, and check that the strategy is active. ``own_padding``: with the padding token
    of the tokenizer's files, as earlier versions trained classifiers.

    Raises InputError for an invalid recipe or launch, RunFailed if the strategy is not active.
    """
    accelerator = make_accelerator(resolved, **accelerator_options)
    if accelerator_options.get("log_with"):
        accelerator.init_trackers(Path(resolved.recipe.run.output_dir).name)
    tokenizer = load_processor(resolved.recipe, own_padding=own_padding)
    return engage(resolved, accelerator, tokenizer, pad_token_of(tokenizer))


def engage(
    resolved: Resolved, accelerator: Accelerator, tokenizer: PreTrainedTokenizerBase | None, pad_token_id: int | None
) -> Session:
    """The second part of ``open_session``. `verify` calls it directly: its samples need no tokenizer."""
    prepared = prepare_model(resolved, pad_token_id, together=True)
    weights = weight_count(prepared.model)
    divide(prepared)
    engine = strategy_of(resolved).engine_for(resolved)(prepared, accelerator)
    claims = engine.evidence()
    if resolved.base is not None:
        claims += resolved.base.claims(engine.model, prepared.bases, resolved, engine.device, prepared.blocks)
    for option, _ in asked_options(resolved.recipe):
        claims += option.evidence(engine.model, prepared.options[option.name])
    failed = [claim for claim in claims if not claim.ok]
    if failed:
        text = "; ".join(f"{claim.claim}: {claim.seen}, expected {claim.expected}" for claim in failed)
        raise NotActive(f"{resolved.recipe.strategy.name} is not active: {text}", failed)
    allow_hours()
    shadows = {option.name: option.keep(engine, settings) for option, settings in shadowing_options(resolved.recipe)}
    return Session(
        resolved,
        tokenizer,
        accelerator,
        engine,
        claims,
        weights,
        prepared.built,
        prepared.reach.never,
        shadows,
        prepared.frozen,
        prepared.loaded_whole,
        notes=prepared.notes,
        group_norms=GroupNorms(engine) if resolved.recipe.run.group_norms else None,
    )


def divide(prepared: Prepared) -> None:
    """Have the model compute what the layouts of the mesh leave this rank. Every rank calls it."""
    for layout, _ in layouts_of(prepared.resolved.mesh):
        layout.spread(prepared)


def seed_micro_batch(seed: int, step: int, micro: int, rank: int) -> None:
    """Seed from the position in the run only, so that a resumed run draws the same dropout masks.

    The four numbers are mixed by splitmix64 (Steele, Lea, Flood, OOPSLA 2014), whose outputs do not collide for
    neighbouring inputs as sums of them would.
    """
    state = seed
    for part in (step, micro, rank):
        state = _splitmix64(state ^ _splitmix64(part))
    _seed_generators(state & 0x7FFF_FFFF_FFFF_FFFF)


def _seed_generators(value: int) -> None:
    """``torch.manual_seed`` of the host and of this process's device. That function keeps the seed for every kind of
    accelerator that is not in use, too, each time with a formatted stack: 0.2 ms a micro-batch (torch 2.13.0)."""
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(value)


def _splitmix64(value: int) -> int:
    mask = 0xFFFF_FFFF_FFFF_FFFF
    value = (value + 0x9E37_79B9_7F4A_7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58_476D_1CE4_E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D0_49BB_1331_11EB) & mask
    return value ^ (value >> 31)
