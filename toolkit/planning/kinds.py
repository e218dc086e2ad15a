"""Kinds of blocks: those of one kind hold and compute the same, so that a trace needs one of them."""

from __future__ import annotations

from typing import Any

from torch import nn


def _signature(name: str, block: nn.Module) -> Any:
    """Two blocks of one signature hold and compute the same: class, weights (trained or not), and the settings that a
    config varies from layer to layer (sliding or full attention, dense or experts)."""
    shapes = tuple((key, tuple(p.shape), p.requires_grad) for key, p in block.named_parameters())
    settings = []
    for key, module in block.named_modules():
        for attribute in ("attention_type", "layer_type", "is_sliding", "sliding_window", "use_rope", "is_decoder"):
            if isinstance(value := getattr(module, attribute, None), str | int | bool | None):
                settings.append((key, attribute, value))
    return (name.rsplit(".", 1)[0], type(block).__name__, shapes, tuple(settings))


_NUMBERED_BLOCKS = ("deepstack_visual_indexes", "fullatt_block_indexes")
"""What a model calls a list of its blocks' numbers: Qwen3-VL's whose output is kept for the text's first blocks, which
``_deepstack_process`` adds there, Qwen2.5-VL's that see a whole image (transformers 5.23)."""


def _named_by_number(model: nn.Module, name: str, unread: tuple[str, int] | None) -> tuple[Any, ...]:
    """What a block is beside others of its signature since its owner names it by its number."""
    parent, _, number = name.rpartition(".")
    path, index = parent.rpartition(".")[0], int(number)
    owner = model.get_submodule(path)
    found: list[Any] = [index in getattr(owner, "fullatt_block_indexes", ())]
    if index in getattr(owner, "deepstack_visual_indexes", ()):
        found.append(index)  # each has a merger of its own
    if hasattr(owner, "_deepstack_process"):
        kept = max(len(getattr(module, "deepstack_visual_indexes", ())) for module in model.modules())
        found.append(min(index, kept))
    if unread is not None and path.startswith(unread[0]):
        found.append(index >= sum(1 for _ in model.get_submodule(parent).children()) + 1 + unread[1])
    return tuple(found)


def _unread(model: nn.Module) -> tuple[str, int] | None:
    """The vision tower of a model that takes the output of a block counted from its end, and that number: LLaVA's is
    -2, so that nothing reads the last block's."""
    config: Any = model.config
    number = getattr(config, "vision_feature_layer", None)
    if not isinstance(number, int) or number >= 0:
        return None
    tower = next((name for name, _ in model.named_modules() if name.rpartition(".")[2] == "vision_tower"), None)
    return None if tower is None else (tower, number)


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
    unread = _unread(model)
    for name, block in blocks:
        parent = name.rsplit(".", 1)[0]
        own = [at for key, at in names.items() if key.startswith(f"{name}.")]
        numbered = _named_by_number(model, name, unread)
        signature = (_signature(name, block), numbered, parent in lists_seen, first < min(own, default=0))
        lists_seen.add(parent)
        if signature not in kinds:
            kinds[signature] = len(kinds)
            kept.add(name)
        order.append(kinds[signature])
    return kept, order


def cut_blocks(model: nn.Module, removed: set[str]) -> None:
    """Take the blocks of these names out of their lists, and renumber those that the model names by number."""
    unread = _unread(model)
    parents = {name.rsplit(".", 1)[0] for name in removed}
    for parent in parents:
        modules = model.get_submodule(parent)
        assert isinstance(modules, nn.ModuleList), f"{parent} is not a ModuleList"
        kept = nn.ModuleList(block for index, block in enumerate(modules) if f"{parent}.{index}" not in removed)
        path, _, attribute = parent.rpartition(".")
        owner: Any = model.get_submodule(path)
        stay = [index for index in range(len(modules)) if f"{parent}.{index}" not in removed]
        for numbers in _NUMBERED_BLOCKS:
            if hasattr(owner, numbers):
                setattr(owner, numbers, [stay.index(index) for index in getattr(owner, numbers) if index in stay])
        if unread is not None and path.startswith(unread[0]):
            config: Any = model.config
            config.vision_feature_layer = len(kept) + 1 + unread[1]  # else counted from the config's number of layers
        setattr(owner, attribute, kept)
