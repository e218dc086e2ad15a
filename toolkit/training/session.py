"""Build an engine from a resolved recipe, and check that its strategy is active."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from toolkit.errors import InputError
from toolkit.model.activation_offload import HostStore
from toolkit.model.adapter_targets import experts_notes
from toolkit.model.adapters import add_adapter, check_names
from toolkit.model.batch_norm import batch_norms
from toolkit.model.batch_norm import convert as convert_batch_norm
from toolkit.model.built import Built
from toolkit.model.checkpointing import checkpoint_blocks, find_blocks
from toolkit.model.compiling import compile_blocks
from toolkit.model.context import divide_rows
from toolkit.model.experts import divide_experts, own_expert_ranks
from toolkit.model.fp8 import check_device, convert
from toolkit.model.freezing import Frozen, freeze_matching
from toolkit.model.head_loss import fuse_head
from toolkit.model.kernels import use_liger
from toolkit.model.load import cast_inputs, load_base, set_dtypes
from toolkit.model.new_tokens import check_trained
from toolkit.model.nf4 import base_linears, quantise_base, weight_count
from toolkit.model.processor import load_processor, pad_token_of
from toolkit.model.sources import NotByPart, fill_model
from toolkit.model.stages import cut
from toolkit.model.tensor import own_ranks, split_layers
from toolkit.model.unreached import freeze, unreached
from toolkit.optim.groups import check_groups, decayed_names, hidden_matrices
from toolkit.optimizers import optimizer_kind
from toolkit.recipe.preflight import with_classes
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.recipe.tokenizer_facts import added_tokens
from toolkit.rooms import asked_options, shadowing_options
from toolkit.strategies import strategy_of
from toolkit.strategies.engines.base import Engine
from toolkit.strategies.engines.claims import Claim, NotActive
from toolkit.strategies.engines.connect import make_accelerator
from toolkit.strategies.engines.float8 import product_claim
from toolkit.strategies.engines.kernels import kernel_claim
from toolkit.strategies.engines.prepared import Prepared
from toolkit.strategies.engines.process_group import allow_hours
from toolkit.strategies.engines.quantised import base_claims
from toolkit.tasks import task_of
from toolkit.training.group_norms import GroupNorms
from toolkit.training.shadow import ShadowWeights
from toolkit.upstream.torch import inside_a_mode

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


def without_values(resolved: Resolved, pad_token_id: int | None = None, *, overwritten: bool = False) -> Prepared:
    """The model of a recipe, of which no weight of the base is read: each has its source (``model/sources.py``).
    ``overwritten``: what trains gets its values afterwards. Raises NotByPart where that is not possible."""
    return _prepared(resolved, pad_token_id, together=False, by_part=True, overwritten=overwritten)


def prepare_model(
    resolved: Resolved, pad_token_id: int | None = None, together: bool = False, by_part: bool | None = None
) -> Prepared:
    """The model of a recipe, ready for its strategy; nothing is sharded yet.

    ``together``: every rank calls it, so that they can divide work between them. Where the strategy shards weights, or
    ranks have some of the blocks, no rank reads them here: each reads its part later (``model/sources.py``).
    If that is not possible, every rank has the whole model, and ``loaded_whole`` of the result says why. ``by_part``:
    other than the strategy decides.
    """
    reason = None
    if by_part is None:
        by_part = together and ("weights" in resolved.traits.shards or resolved.mesh.pipeline > 1)
    if by_part:
        try:
            return _prepared(resolved, pad_token_id, together, by_part=True)
        except NotByPart as problem:
            reason = str(problem)
    return replace(_prepared(resolved, pad_token_id, together, by_part=False), loaded_whole=reason)


def _prepared(
    resolved: Resolved, pad_token_id: int | None, together: bool, by_part: bool, overwritten: bool = False
) -> Prepared:
    """Model, kernels, float8 products, adapter, frozen weights, quantised base, dtypes, compiling, checkpointing, in
    this order.

    Kernels come before adapters, which copy modules that they train in place of the model's. Products come before
    adapters, whose own small matrices stay as they are. Adapters and freezing come before dtypes,
    since they decide what trains, and checkpointing after all, since it takes the blocks' forwards as they then are.
    """
    if by_part and resolved.base_storage is not None:
        raise NotByPart("its weights are packed in 4 bits at the start")
    if by_part and added_tokens(resolved.recipe):
        raise NotByPart("its embeddings get rows for new tokens")
    if by_part and inside_a_mode():
        raise NotByPart("tensors are fake")  # as in the rehearsal
    if not by_part:
        check_names(resolved, pad_token_id)
    model: nn.Module = load_base(resolved, pad_token_id, by_part=by_part)
    built = Built.of(model)
    kernels = use_liger(model, resolved) if resolved.recipe.model.kernels == "liger" else None
    asked = resolved.recipe.model.batch_norm is not None
    convert_batch_norm(model, resolved.batch_norm, asked, resolved.source)
    _check_statistics(model, resolved)
    linears = {} if resolved.base_storage is None else base_linears(model, resolved)
    products: list[str] = []
    bases = {name: linear.weight.numel() for name, linear in linears.items()}
    if resolved.recipe.fp8:
        check_device(resolved)
        products = convert(model, find_blocks(model, resolved), resolved)
    notes: list[str] = []
    if resolved.recipe.adapter is not None:
        model = add_adapter(model, resolved, overwritten)
        notes = experts_notes(model, resolved.recipe.adapter)
    frozen = freeze_matching(model, resolved.recipe.model.freeze, resolved.source)
    check_trained(model, resolved)
    idle = unreached(model, resolved)
    if resolved.base_storage is not None:
        quantise_base(model, linears, resolved, together)
    del linears
    set_dtypes(model, resolved.precision.trainable, resolved.precision.frozen)
    freeze(model, idle)
    casts = not (resolved.traits.autocast and resolved.precision.mixed)
    if casts and task_of(resolved.recipe.model.task).media is not None:
        cast_inputs(model, getattr(torch, resolved.precision.compute))
    for option, settings in asked_options(resolved.recipe):
        option.apply(model, settings)
    if resolved.loss_kernel != "plain":
        fuse_head(model, resolved)
    blocks = []
    if resolved.recipe.activation_checkpointing != "none" or resolved.blocks:
        blocks = find_blocks(model, resolved)
    if resolved.recipe.compile:
        compile_blocks(blocks)
    store = HostStore() if resolved.recipe.activation_offload else None
    checkpoint_blocks(blocks, resolved.recipe.activation_checkpointing, store)
    model.train()
    optimizer = resolved.recipe.optimizer
    decayed = decayed_names(model, optimizer)
    matrices = hidden_matrices(model, task_of(resolved.recipe.model.task).heads)
    check_groups(optimizer, (name for name, p in model.named_parameters() if p.requires_grad), resolved.source)
    return Prepared(model, resolved, built, decayed, blocks, bases, products, matrices, idle, frozen, kernels=kernels,
                    notes=notes)  # fmt: skip


def _check_statistics(model: nn.Module, resolved: Resolved) -> None:
    """Raise InputError where running statistics of the training weights would be used with averaged ones."""
    name = resolved.recipe.optimizer.name
    if optimizer_kind(name).averages and any(layer.mode != "frozen" for layer in batch_norms(model).values()):
        raise InputError(
            f"{resolved.source}: optimizer.name: {name} evaluates and exports averaged weights, and the running "
            "statistics of this model's batch normalisation are those of other weights; set model.batch_norm: frozen, "
            "or use adamw"
        )


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
    if resolved.base_storage is not None:
        claims += base_claims(engine.model, prepared.bases, resolved, engine.device, prepared.blocks)
    if resolved.recipe.fp8:
        claims.append(product_claim(engine.model, len(prepared.products)))
    if prepared.kernels is not None:
        claims.append(kernel_claim(engine.model, prepared.kernels))
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
        prepared.unreached,
        shadows,
        prepared.frozen,
        prepared.loaded_whole,
        notes=prepared.notes,
        group_norms=GroupNorms(engine) if resolved.recipe.run.group_norms else None,
    )


def divide(prepared: Prepared) -> None:
    """Have the model compute a part of its rows, of its layers, or some of its blocks or experts, where the mesh
    divides them. Every rank calls it."""
    resolved = prepared.resolved
    divide_rows(prepared.model, resolved)
    if resolved.mesh.tensor > 1:
        prepared.divisions = split_layers(prepared.model, own_ranks(resolved), resolved.source)
    if resolved.mesh.expert > 1:
        prepared.divisions = divide_experts(prepared.model, own_expert_ranks(resolved), resolved.source)
    if resolved.mesh.pipeline > 1:
        index = resolved.mesh.stage(dist.get_rank())
        blocks = find_blocks(prepared.model, resolved)
        dtype = None if resolved.traits.autocast else getattr(torch, resolved.precision.compute)
        prepared.stage = cut(prepared.model, blocks, index, resolved.mesh.pipeline, resolved.source, dtype)
        prepared.blocks = [blocks[at] for at in prepared.stage.blocks]
    if resolved.mesh.pipeline > 1 and "weights" not in resolved.traits.shards:
        fill_model(prepared.model)


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
