"""Kinds of blocks: those of one kind hold and compute the same, so that a trace needs one of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

_VARIED = ("attention_type", "layer_type", "is_sliding", "sliding_window", "use_rope", "is_decoder", "in_4_bits")


def _signature(name: str, block: nn.Module) -> Any:
    """Two blocks of one signature hold and compute the same: class, weights (trained or not), and the settings that a
    config varies from layer to layer (sliding or full attention, dense or experts)."""
    shapes = tuple((key, tuple(p.shape), p.requires_grad) for key, p in block.named_parameters())
    settings = []
    for key, module in block.named_modules():
        for attribute in _VARIED:
            if isinstance(value := getattr(module, attribute, None), str | int | bool | None):
                settings.append((key, attribute, value))
    return (name.rsplit(".", 1)[0], type(block).__name__, shapes, tuple(settings))


_NUMBERED_BLOCKS = ("deepstack_visual_indexes", "fullatt_block_indexes")
"""What a model calls a list of its blocks' numbers: Qwen3-VL's whose output is kept for the text's first blocks, which
``_deepstack_process`` adds there, Qwen2.5-VL's that see a whole image (transformers 5.23)."""


@dataclass(frozen=True)
class _Taken:
    """Which of a vision tower's states a model takes (``vision_feature_layer``): 0 is what its first block reads, n
    what its n-th one makes. LLaVA's is the last but one, so that nothing reads the last block's."""

    tower: str
    states: tuple[int, ...]

    @property
    def last(self) -> int:
        return max(self.states)


def _taken(model: nn.Module, blocks: Iterable[str]) -> _Taken | None:
    """``blocks``: the names of all of the model's."""
    config: Any = model.config
    layers = getattr(config, "vision_feature_layer", None)
    tower = next((name for name, _ in model.named_modules() if name.rpartition(".")[2] == "vision_tower"), None)
    if layers is None or tower is None:
        return None
    count = sum(name.startswith(f"{tower}.") for name in blocks)
    states = [layers] if isinstance(layers, int) else layers
    return _Taken(tower, tuple(state if state >= 0 else count + 1 + state for state in states))


def _named_by_number(model: nn.Module, name: str, taken: _Taken | None) -> tuple[Any, ...]:
    """What a block is beside others of its signature since its owner names it by its number."""
    parent, _, number = name.rpartition(".")
    if not number.isdigit():
        return ()  # one of its class alone, as PaliGemma's projector
    path, index = parent.rpartition(".")[0], int(number)
    owner = model.get_submodule(path)
    found: list[Any] = [index in getattr(owner, "fullatt_block_indexes", ())]
    if index in getattr(owner, "deepstack_visual_indexes", ()):
        found.append(index)  # each has a merger of its own
    if "deepstack_visual_embeds" in inspect.signature(owner.forward).parameters:
        kept = max(len(getattr(module, "deepstack_visual_indexes", ())) for module in model.modules())
        found.append(min(index, kept))
    if taken is not None and name.startswith(f"{taken.tower}."):
        found.append(index >= taken.last)
        found += [state for state in taken.states if state == index + 1 != taken.last]
    return tuple(found)


def choose_blocks(model: nn.Module, blocks: list[tuple[str, nn.Module]]) -> tuple[set[str], list[int]]:
    """The names of the blocks that stay, one of each kind, and the kind of every block. The first of each list is a
    kind of its own: frozen embeddings ask for no gradient of its input, so that it saves less than the others. So are
    blocks in front of which nothing is trained."""
    names = {name: at for at, (name, _) in enumerate(model.named_parameters())}
    first = min((names[name] for name, p in model.named_parameters() if p.requires_grad), default=len(names))
    kinds: dict[Any, int] = {}
    kept: set[str] = set()
    order = []
    lists_seen: set[str] = set()
    taken = _taken(model, (name for name, _ in blocks))
    for name, block in blocks:
        parent = name.rsplit(".", 1)[0]
        own = [at for key, at in names.items() if key.startswith(f"{name}.")]
        numbered = _named_by_number(model, name, taken)
        signature = (_signature(name, block), numbered, parent in lists_seen, first < min(own, default=0))
        lists_seen.add(parent)
        if signature not in kinds:
            kinds[signature] = len(kinds)
            kept.add(name)
        order.append(kinds[signature])
    return kept, order


def cut_blocks(model: nn.Module, blocks: list[tuple[str, nn.Module]], kept: set[str]) -> None:
    """Take the ``blocks`` that are not ``kept`` out of their lists; renumber those that the model names by number."""
    taken = _taken(model, (name for name, _ in blocks))
    for parent in {name.rsplit(".", 1)[0] for name, _ in blocks if name not in kept}:
        modules = model.get_submodule(parent)
        assert isinstance(modules, nn.ModuleList), f"{parent} is not a ModuleList"
        path, _, attribute = parent.rpartition(".")
        owner: Any = model.get_submodule(path)
        stay = [index for index in range(len(modules)) if f"{parent}.{index}" in kept]
        for numbers in _NUMBERED_BLOCKS:
            if hasattr(owner, numbers):
                setattr(owner, numbers, [stay.index(index) for index in getattr(owner, numbers) if index in stay])
        if taken is not None and parent.startswith(f"{taken.tower}."):
            # A state that is taken is that of a block that stays; of the last one's kind, the last that stays.
            states = [sum(index < state for index in stay) for state in taken.states]
            config: Any = model.config  # a number from the end would count from the config's number of layers
            config.vision_feature_layer = states if isinstance(config.vision_feature_layer, list) else states[0]
        setattr(owner, attribute, nn.ModuleList(modules[index] for index in stay))
