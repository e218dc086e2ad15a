"""A model without weights: what it holds, counted from its config alone, and a short version of it to trace.

The whole base model is made on the meta device and counted, then all but a few of its repeated blocks are taken
out, adapters are added to what is left, and what one block of a kind holds is multiplied by their number.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from toolkit.errors import InputError
from toolkit.model.adapters import add_adapter
from toolkit.model.checkpointing import find_blocks
from toolkit.recipe.resolve import Resolved


@dataclass(frozen=True)
class Weight:
    """One parameter: its shape, and whether it trains."""

    name: str
    shape: tuple[int, ...]
    trains: bool
    decays: bool

    @property
    def numel(self) -> int:
        return int(torch.Size(self.shape).numel())


@dataclass
class Kind:
    """Blocks that hold and compute the same. ``traced``: the one of them in the short model."""

    count: int
    weights: list[Weight]
    traced: int
    class_name: str

    def elements(self, trains: bool | None = None) -> int:
        return sum(w.numel for w in self.weights if trains is None or w.trains == trains)


@dataclass
class Skeleton:
    """What a model holds. ``kinds`` times their counts, and ``outside``, is all of it; tied weights count once."""

    config: Any
    kinds: list[Kind]
    outside: list[Weight]
    buffers: int
    """Bytes of buffers in the whole model."""
    model: nn.Module = field(repr=False)
    """The short model, on the meta device: one block of every kind, the very first block apart."""
    blocks: list[tuple[str, nn.Module]] = field(repr=False, default_factory=list)

    def elements(self, trains: bool | None = None) -> int:
        outside = sum(w.numel for w in self.outside if trains is None or w.trains == trains)
        return outside + sum(kind.count * kind.elements(trains) for kind in self.kinds)

    def weights(self) -> list[tuple[Weight, int]]:
        """Every weight, with how many of the same there are."""
        inside = [(weight, kind.count) for kind in self.kinds for weight in kind.weights]
        return inside + [(weight, 1) for weight in self.outside]


def build(resolved: Resolved) -> Skeleton:
    """Make the skeleton of a recipe's model; no weights are loaded, only its config.

    Raises InputError where the config cannot be had, needs code of its own, or names an unknown model.
    """
    model = _meta_model(resolved)
    blocks = find_blocks(model, resolved.blocks, resolved.source) if resolved.blocks else []
    chosen = _choose(model, blocks)
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    _cut(model, {name for name, _ in blocks} - set(chosen))
    if resolved.recipe.adapter is not None:
        model = add_adapter(model, resolved)
    else:
        model.requires_grad_(True)
    model.train()
    kept = find_blocks(model, resolved.blocks, resolved.source) if resolved.blocks else []
    return _count(model, kept, [count for _, count in chosen.values()], buffers, resolved)


def _meta_model(resolved: Resolved) -> nn.Module:
    import transformers
    from transformers.initialization import no_init_weights

    from toolkit.model.load import _AUTO_CLASSES, _config

    spec = resolved.recipe.model
    if resolved.facts.config is None:
        raise InputError(
            f"{resolved.source}: model.path: {resolved.facts.why_unknown}; give a folder with its config.json, "
            "or model.config in its place"
        )
    config = _config(resolved, 0)
    attention = spec.attention
    if attention.startswith("flash_attention") or attention == "flex_attention":
        attention = "sdpa"  # saves the same tensors; the packages that run it need not be here
    try:
        with torch.device("meta"), no_init_weights():
            model = getattr(transformers, _AUTO_CLASSES[spec.task]).from_config(
                config,
                dtype=torch.float32,
                attn_implementation=attention,
                trust_remote_code=spec.trust_remote_code,
            )
    except (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"{resolved.source}: model: cannot be made from its config: {first}") from None
    model.config.use_cache = False
    return model


def _signature(model: nn.Module, name: str, block: nn.Module) -> Any:
    """Two blocks of one signature hold and compute the same: class, weights, and the settings that a config
    varies from layer to layer (sliding or full attention, dense or experts)."""
    shapes = tuple((key, tuple(p.shape)) for key, p in block.named_parameters())
    settings = []
    for key, module in block.named_modules():
        for attribute in ("attention_type", "layer_type", "is_sliding", "sliding_window", "use_rope", "is_decoder"):
            if isinstance(value := getattr(module, attribute, None), str | int | bool | None):
                settings.append((key, attribute, value))
    return (name.rsplit(".", 1)[0], type(block).__name__, shapes, tuple(settings))


def _choose(model: nn.Module, blocks: list[tuple[str, nn.Module]]) -> dict[str, tuple[nn.Module, int]]:
    """Which blocks stay, and for how many each stands. The first of each list stays for itself alone: frozen
    embeddings ask for no gradient of its input, so that it saves less than the others."""
    groups: dict[Any, list[tuple[str, nn.Module]]] = {}
    lists_seen: set[str] = set()
    for name, block in blocks:
        parent = name.rsplit(".", 1)[0]
        signature = (_signature(model, name, block), parent not in lists_seen)
        lists_seen.add(parent)
        groups.setdefault(signature, []).append((name, block))
    kept = {members[0][0]: (members[0][1], len(members)) for members in groups.values()}
    return {name: kept[name] for name, _ in blocks if name in kept}


def _cut(model: nn.Module, removed: set[str]) -> None:
    parents = {name.rsplit(".", 1)[0] for name in removed}
    for parent in parents:
        modules = model.get_submodule(parent)
        assert isinstance(modules, nn.ModuleList), f"{parent} is no ModuleList"
        kept = nn.ModuleList(
            block for index, block in enumerate(modules) if f"{parent}.{index}" not in removed
        )
        owner, _, attribute = parent.rpartition(".")
        setattr(model.get_submodule(owner), attribute, kept)


def _count(
    model: nn.Module, blocks: list[tuple[str, nn.Module]], counts: list[int], buffers: int, resolved: Resolved
) -> Skeleton:
    from toolkit.training.optimizer import decayed_names

    decayed = decayed_names(model, resolved.recipe.optimizer)
    kinds = []
    inside: set[str] = set()
    for (name, block), count in zip(blocks, counts, strict=True):
        own = {f"{name}.{key}": p for key, p in block.named_parameters()}
        inside |= set(own)
        weights = [Weight(key, tuple(p.shape), p.requires_grad, key in decayed) for key, p in own.items()]
        kinds.append(Kind(count, weights, len(kinds), type(block).__name__))
    outside = [
        Weight(key, tuple(p.shape), p.requires_grad, key in decayed)
        for key, p in model.named_parameters()
        if key not in inside
    ]
    return Skeleton(model.config, kinds, outside, buffers, model, blocks)


__all__ = ["Kind", "Skeleton", "Weight", "build", "dataclasses"]
