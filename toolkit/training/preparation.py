"""The model of a recipe before its strategy wraps it: ``STEPS``, in their order, over what they fill.

Every step says why it stands where it stands. `plan` takes most of them in an order of its own
(`toolkit/planning/skeleton.py`): it removes blocks between them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from toolkit.model.adapter_targets import experts_notes
from toolkit.model.adapters import add_adapter, check_names
from toolkit.model.built import Built
from toolkit.model.checkpointing import checkpoint_blocks, find_blocks
from toolkit.model.compiling import compile_blocks
from toolkit.model.freezing import freeze_matching
from toolkit.model.head_loss import fuse_head
from toolkit.model.load import cast_inputs, load_base, set_dtypes
from toolkit.model.new_tokens import check_trained
from toolkit.model.sources import NotByPart
from toolkit.model.unreached import freeze, reach
from toolkit.optim.groups import check_groups, decayed_names, hidden_matrices
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.tokenizer_facts import added_tokens
from toolkit.rooms import asked_options, prepare_options, store_of
from toolkit.strategies.engines.prepared import Prepared
from toolkit.tasks import task_of
from toolkit.upstream.torch import inside_a_mode


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
    if by_part:
        _check_by_part(resolved)
    else:
        check_names(resolved)
    model: nn.Module = load_base(resolved, pad_token_id, by_part=by_part)
    work = Work(Prepared(model, resolved, Built.of(model)), together, overwritten)
    for step in STEPS:
        step(work)
    return work.prepared


def _check_by_part(resolved: Resolved) -> None:
    """Raise NotByPart where a rank cannot read its part of the weights after the model is built."""
    if resolved.base is not None:
        raise NotByPart("its weights are packed in 4 bits at the start")
    if added_tokens(resolved.recipe):
        raise NotByPart("its embeddings get rows for new tokens")
    if inside_a_mode():
        raise NotByPart("tensors are fake")  # as in the rehearsal


@dataclass
class Work:
    """A model between two steps."""

    prepared: Prepared
    """The result."""
    together: bool
    overwritten: bool
    linears: dict[str, nn.Linear] = field(default_factory=dict)
    """The base's linear layers that are to be packed in 4 bits, by name."""

    @property
    def model(self) -> nn.Module:
        return self.prepared.model

    @property
    def resolved(self) -> Resolved:
        return self.prepared.resolved


def replace_modules(work: Work) -> None:
    """Options that replace modules or their forwards: before adapters, which copy modules that they train in place of
    the model's, and whose own small matrices stay as they are."""
    for option, settings in asked_options(work.resolved.recipe):
        option.check_device(settings, work.resolved)
    work.prepared.options |= prepare_options(work.model, work.resolved, before_adapters=True)


def find_base_linears(work: Work) -> None:
    """Before adapters, whose own linear layers stay as they are, and which rename the model's."""
    if (base := work.resolved.base) is not None:
        work.linears = base.linears(work.model, work.resolved)
        work.prepared.bases = {name: linear.weight.numel() for name, linear in work.linears.items()}


def add_adapters(work: Work) -> None:
    """Before freezing, whose patterns name the weights of adapters too."""
    adapter = work.resolved.recipe.adapter
    if adapter is not None:
        work.prepared.model = add_adapter(work.model, work.resolved, work.overwritten)
        work.prepared.notes = experts_notes(work.model, adapter)


def freeze_patterns(work: Work) -> None:
    """Before dtypes, which depend on what trains."""
    work.prepared.frozen = freeze_matching(work.model, work.resolved.recipe.model.freeze, work.resolved.source)
    check_trained(work.model, work.resolved)


def find_unreached(work: Work) -> None:
    """After all that decides what trains; before packing, since it runs the layers as they are."""
    work.prepared.reach = reach(work.model, work.resolved, sampled=True)


def pack_base(work: Work) -> None:
    """After adapters, some of which begin with values computed from the base's; before dtypes, which round them."""
    if (base := work.resolved.base) is not None:
        base.pack(work.model, work.linears, work.resolved, work.together)
    work.linears = {}  # they hold the unpacked weights


def set_precision(work: Work) -> None:
    """After packing, which takes the weights in the dtype of the file; it leaves packed ones as they are."""
    precision = work.resolved.precision
    set_dtypes(work.model, precision.trainable, precision.frozen)


def freeze_unreached(work: Work) -> None:
    """After dtypes, since they keep the dtype of what trains: the model still computes with them."""
    freeze(work.model, work.prepared.reach.never)


def cast_media(work: Work) -> None:
    """After dtypes, since inputs that are numbers get the dtype of the weights, where no autocast does it."""
    resolved = work.resolved
    casts = not (resolved.traits.autocast and resolved.precision.mixed)
    if casts and task_of(resolved.recipe.model.task).media is not None:
        cast_inputs(work.model, getattr(torch, resolved.precision.compute))


def apply_options(work: Work) -> None:
    """Other options: on the adapted model of its final dtypes, before anything takes its forward."""
    work.prepared.options |= prepare_options(work.model, work.resolved, before_adapters=False)


def fuse_loss(work: Work) -> None:
    """After options, whose hooks see what the model sees."""
    if work.resolved.loss_kernel != "plain":
        fuse_head(work.model, work.resolved)


def compile_forwards(work: Work) -> None:
    """After all that changes modules inside of blocks, before checkpointing, which calls what is compiled."""
    recipe = work.resolved.recipe
    if recipe.activation_checkpointing != "none" or work.resolved.blocks:
        work.prepared.blocks = find_blocks(work.model, work.resolved)
    if recipe.compile:
        compile_blocks(work.prepared.blocks)


def checkpoint_forwards(work: Work) -> None:
    """Last of what changes the model: it takes the blocks' forwards as they then are."""
    recipe = work.resolved.recipe
    checkpoint_blocks(work.prepared.blocks, recipe.activation_checkpointing, store_of(recipe))
    work.model.train()


def group_parameters(work: Work) -> None:
    """At the end, when it is known what trains, by which name."""
    model, recipe, prepared = work.model, work.resolved.recipe, work.prepared
    prepared.decayed = decayed_names(model, recipe.optimizer)
    prepared.matrices = hidden_matrices(model, task_of(recipe.model.task).heads)
    trained = (name for name, p in model.named_parameters() if p.requires_grad)
    check_groups(recipe.optimizer, trained, work.resolved.source)


STEPS: tuple[Callable[[Work], None], ...] = (
    replace_modules,
    find_base_linears,
    add_adapters,
    freeze_patterns,
    find_unreached,
    pack_base,
    set_precision,
    freeze_unreached,
    cast_media,
    apply_options,
    fuse_loss,
    compile_forwards,
    checkpoint_forwards,
    group_parameters,
)
