"""A model without weights: its contents, counted from its config, and a short version to trace.

The whole base model is constructed on the meta device and counted. Then all but a few of its repeated blocks are
removed, adapters are added to the rest, and the contents of one block of a kind are multiplied by their number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from toolkit.errors import InputError, first_line
from toolkit.layouts import layouts_of
from toolkit.model.adapters import add_adapter
from toolkit.model.checkpointing import find_blocks
from toolkit.model.freezing import freeze_matching
from toolkit.model.load import switch_off_cache
from toolkit.model.packed_layers import packed_layers
from toolkit.model.tensor import Division
from toolkit.model.unreached import freeze, reach
from toolkit.optim.groups import decayed_names, group_of, hidden_matrices
from toolkit.planning.contents import Contents
from toolkit.planning.kinds import choose_blocks, cut_blocks
from toolkit.plugins import named
from toolkit.recipe.adapter_methods import METHODS
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Adapter, Optimizer
from toolkit.rooms import attention_name, prepare_options
from toolkit.strategies import strategy_of
from toolkit.strategies.memory.base import Holdings, Weight
from toolkit.tasks import task_of


@dataclass
class Skeleton:
    """The contents of a model, and its short version."""

    config: Any
    """transformers' configuration of the whole model."""
    holdings: Holdings
    """The weights of the whole model."""
    model: nn.Module = field(repr=False)
    """The short model, on the meta device: one block of every kind, the very first block apart."""
    blocks: list[tuple[str, nn.Module]] = field(repr=False, default_factory=list)
    """Name and module of the short model's blocks, in the order of their kinds."""
    resolved: Resolved | None = field(repr=False, default=None)
    """The recipe that it was created from."""

    def contents(self) -> Contents:
        """What a plan asks of it beside traces."""
        text = self.config.get_text_config() if hasattr(self.config, "get_text_config") else self.config
        return Contents(self.holdings, int(getattr(text, "vocab_size", None) or 0))


def build_as_is(resolved: Resolved, model: nn.Module) -> Skeleton:
    """The skeleton of a training loop's own ``model``, on the meta device, which has its adapters. Its blocks are the
    modules of its lists, all its linear layers are quantised, the head too."""
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    blocks = [(f"{name}.{at}", block) for name, modules in lists for at, block in enumerate(modules)]
    kept, order = choose_blocks(model, blocks)
    cut_blocks(model, blocks, kept)
    if resolved.base is not None:
        linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        resolved.base.size(model, linears, resolved)
    model.train()
    short = [(name, module) for name, module in model.named_modules() if name.rpartition(".")[0] in dict(lists)]
    return Skeleton(model.config, _count(model, short, order, 0, resolved, {}), model, short, resolved)


def build(resolved: Resolved, double_quant: bool = True) -> Skeleton:
    """Create the skeleton of a recipe's model: float32 weights on the meta device, 4-bit ones in their packed dtype.

    Only the config is loaded. ``double_quant``: whether statistics of 4-bit weights are quantised too. Raises
    InputError if the config is not available or no model can be built from it without code of its own, if the model has
    none of the blocks, the adapter's target modules, or what an option changes, and if its strategy cannot train it.
    """
    model = _meta_model(resolved)
    adapter = resolved.recipe.adapter
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    own = {id(buffer) for buffer in model.buffers()}
    frozen = resolved.recipe.model.freeze
    whole = adapter is not None and (_differs_by_layer(adapter) or bool(frozen))
    linears = {} if resolved.base is None else resolved.base.linears(model, resolved)
    for linear in linears.values():
        vars(linear)["in_4_bits"] = True  # blocks that differ in it are of different kinds
    if whole:
        model = _adapted(model, resolved)  # before blocks are removed: what a block gets depends on its number
    freeze_matching(model, frozen, resolved.source)  # before blocks are removed: patterns may name layers
    blocks = find_blocks(model, resolved) if resolved.blocks else []
    kept, order = choose_blocks(model, blocks)
    cut_blocks(model, blocks, kept)
    left = set(model.modules())
    linears = {name: linear for name, linear in linears.items() if linear in left}
    prepare_options(model, resolved, before_adapters=True, traced=True)
    if adapter is not None and not whole:
        model = _adapted(model, resolved)
    if linears and resolved.base is not None:
        resolved.base.size(model, linears, resolved, double_quant)
    divided: dict[str, Division] = {}
    for layout, size in layouts_of(resolved.mesh):
        divided |= layout.divide(model, named(layout.acted)(size), resolved.source)
    _freeze_unreached(model, resolved)
    prepare_options(model, resolved, before_adapters=False, traced=True)
    model.train()
    short = find_blocks(model, resolved) if resolved.blocks else []
    buffers += _projections(model, short, order, own)
    holdings = _count(model, short, order, buffers, resolved, divided)
    return Skeleton(model.config, holdings, model, short, resolved)


def _freeze_unreached(model: nn.Module, resolved: Resolved) -> None:
    """Freeze what no output depends on, as a session does."""
    found = reach(model, resolved)
    strategy_of(resolved).check_reach(found.by_row, resolved, by_values=found.by_values)
    freeze(model, found.never)


def _adapted(model: nn.Module, resolved: Resolved) -> nn.Module:
    try:
        return add_adapter(model, _started_from_nothing(resolved))
    except InputError as error:
        if not any(sign in str(error) for sign in ("meta", "set_data")):  # what torch says of tensors without values
            raise
        assert resolved.recipe.adapter is not None
        name = resolved.recipe.adapter.method
        raise InputError(
            f"{resolved.source}: adapter.method: {name} is created from the values of weights, which a plan "
            "does not have. Measure it in place: toolkit bench RECIPE"
        ) from None


_DECOMPOSED = ("pissa", "olora")


def _started_from_nothing(resolved: Resolved) -> Resolved:
    """With LoRA's own start in place of one that decomposes base weights (PiSSA, OLoRA): a plan has none to decompose,
    and the adapter and the changed base have the same shapes and dtypes."""
    adapter = resolved.recipe.adapter
    start = None if adapter is None else adapter.options.get("init_lora_weights")
    if adapter is None or not (isinstance(start, str) and start.startswith(_DECOMPOSED)):
        return resolved
    plain = adapter.model_copy(update={"options": adapter.options | {"init_lora_weights": True}})
    return replace(resolved, recipe=resolved.recipe.model_copy(update={"adapter": plain}))


_NUMBERED = ("layers_to_transform", "adapter_layers", "exclude_modules", "rank_pattern", "alpha_pattern",
             "lambda_pattern", "n_frequency_pattern", "block_size_pattern")  # fmt: skip


def _differs_by_layer(adapter: Adapter) -> bool:
    """Whether blocks of one kind may get different adapters. An adapter for the whole model takes longer to create."""
    targets = adapter.target_modules
    named = [targets] if isinstance(targets, str) and targets != "all-linear" else targets
    numbered = isinstance(named, list) and any(character.isdigit() for name in named for character in name)
    pattern = isinstance(targets, str) and targets != "all-linear"
    return METHODS[adapter.method].shares or numbered or pattern or any(adapter.options.get(key) for key in _NUMBERED)


def _projections(model: nn.Module, short: list[tuple[str, nn.Module]], order: list[int], own: set[int]) -> int:
    """Bytes of an adapter's buffers (frozen projections, indices) in the whole model; one that layers share is counted
    once. ``own``: ids of the base model's buffers."""
    total = 0
    for name, buffer in model.named_buffers():
        if id(buffer) in own:
            continue
        kind = next((at for at, (block, _) in enumerate(short) if name.startswith(f"{block}.")), None)
        total += buffer.numel() * buffer.element_size() * (1 if kind is None else order.count(kind))
    return total


def _meta_model(resolved: Resolved) -> nn.Module:
    import transformers
    from transformers.initialization import no_init_weights

    from toolkit.model.load import build_config, cast_buffers, cast_parameters, load_dtype, loaded_buffers, set_padding
    from toolkit.model.new_tokens import add_rows
    from toolkit.tasks import task_of

    spec = resolved.recipe.model
    if resolved.facts.config is None:
        raise InputError(
            f"{resolved.source}: model.path: {resolved.facts.why_unknown}; use a folder with a config.json, "
            "or model.config"
        )
    config = build_config(resolved)
    attention = attention_name(resolved, traced=True) or "sdpa"
    if attention.startswith("flash_attention"):
        attention = _flash(resolved.precision.compute)
    elif attention == "flex_attention":
        attention = "sdpa"  # saves the same tensors
    try:
        with torch.device("meta"), no_init_weights():
            model = getattr(transformers, task_of(spec.task).auto_class).from_config(
                config,
                dtype=load_dtype(resolved),
                attn_implementation=attention,
                trust_remote_code=spec.trust_remote_code,
            )
    except (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError) as error:
        first = first_line(error)
        raise InputError(f"{resolved.source}: model: cannot be built from its config: {first}") from None
    cast_parameters(model, torch.float32)
    cast_buffers(model, loaded_buffers(model, load_dtype(resolved)))
    model.tie_weights()  # left out with the initialisation
    add_rows(model, resolved)
    set_padding(model.config, 0, resolved)  # a classifier asks for one
    switch_off_cache(model)
    return model


def _flash(compute: str) -> str:
    """transformers' name of an attention that saves what a flash kernel does, whose package need not be here: sdpa,
    which gets no mask, not even for a sliding window. float32, which norms in it make of what they are given, is copied
    to ``compute`` first (transformers 5.23, integrations/flash_attention.py, ``get_target_dtype``): the kernels have 16
    bits alone."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import flash_attention_mask

    dtype = getattr(torch, compute)

    def forward(module: nn.Module, *tensors: torch.Tensor, **options: Any) -> Any:
        given = (one.to(dtype) if getattr(one, "dtype", None) == torch.float32 else one for one in tensors)
        return sdpa_attention_forward(module, *given, **options)

    name = f"planned_lengths_{compute}"
    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, flash_attention_mask)
    return name


def _count(
    model: nn.Module,
    blocks: list[tuple[str, nn.Module]],
    order: list[int],
    buffers: int,
    resolved: Resolved,
    divided: Mapping[str, Division],
) -> Holdings:
    """``divided``: how those weights are of which the model has this rank's part."""
    optimizer = resolved.recipe.optimizer
    decayed, matrices = _decaying(model, optimizer), hidden_matrices(model, task_of(resolved.recipe.model.task).heads)
    kinds: list[list[Weight]] = []
    inside: set[str] = set()
    everything = {
        key: Weight(
            key,
            tuple(p.shape),
            p.requires_grad,
            key in decayed,
            p.numel(),
            group=-1 if (at := group_of(optimizer, key)) is None else at,
            matrix=key in matrices,
            ranks=divided[key].count if key in divided else 1,
        )
        for key, p in model.named_parameters()
    }
    for key, layer in packed_layers(model).items():
        shape, packed = (layer.out_features, layer.in_features), layer.weight
        everything[f"{key}.weight"] = Weight(
            f"{key}.weight",
            shape,
            False,
            False,
            shape[0] * shape[1],
            packed.numel() * packed.element_size(),
            layer.statistics_bytes(),
        )
    for name, _ in blocks:
        own = [weight for key, weight in everything.items() if key.startswith(name + ".")]
        inside |= {weight.name for weight in own}
        kinds.append(own)
    outside = [weight for key, weight in everything.items() if key not in inside]
    embeddings = {id(p) for p in _of(model, "get_input_embeddings")}
    embedding_names = {key for key, p in model.named_parameters() if id(p) in embeddings}
    tied = bool(embeddings & {id(p) for p in _of(model, "get_output_embeddings")})
    embed = [weight for weight in outside if weight.name in embedding_names]
    tail = [weight for weight in outside if weight.name not in embedding_names]
    return Holdings(kinds, order, embed, tail, tied, buffers, everything)


def _decaying(model: nn.Module, optimizer: Optimizer) -> frozenset[str]:
    """Names in an optimizer group with decay: those of a group of the recipe with a decay of its own too."""
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    numbers = {name: group_of(optimizer, name) for name in trained}
    own = {name for name, at in numbers.items() if at is not None and optimizer.groups[at].weight_decay is not None}
    return decayed_names(model, optimizer) | own


def _of(model: nn.Module, getter: str) -> list[nn.Parameter]:
    """The parameters of a module that transformers names by a method, [] where it names none."""
    try:
        module = getattr(model, getter)()
    except (AttributeError, NotImplementedError):
        return []
    return [] if module is None else list(module.parameters())
