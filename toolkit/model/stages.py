"""A model of which this process has some consecutive blocks: a stage of a pipeline.

The model stays the transformers model, whose forward runs on every stage: masks and positions are made there as always.
What other stages have is replaced by modules without weights, which give back what they are given. The first own block
takes the hidden states of the stage before in place of what reaches it, and what the last own block gives is handed to
the stage after it. Names of parameters do not change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from toolkit.errors import InputError, RunFailed
from toolkit.model.head_loss import answer_wanted
from toolkit.model.tensor import transformers_base
from toolkit.recipe.mesh import stage_blocks

Take = Callable[[torch.Size], torch.Tensor]
"""Given the shape of the hidden states, those that the stage before has sent."""
Give = Callable[[torch.Tensor], None]
"""Sends hidden states to the stage after this one."""


@dataclass
class Stage:
    """What a process has of a model that is divided into ``count`` stages, of which it is number ``index``."""

    index: int
    count: int
    blocks: range
    """Numbers of its blocks."""
    own: dict[str, nn.Parameter]
    """Its parameters by their names in the whole model. A weight that the embedding and the head share is in the first
    stage and in the last one, under one name."""
    owners: dict[str, int]
    """Of every parameter of the whole model, in its order, the first stage that has it."""
    shared: list[str]
    """Parameters that the first stage and the last one both have."""
    names: dict[str, str] = field(default_factory=dict)
    """Names in the whole model of parameters that have another one in the model that was cut: a shared weight's."""
    tied: list[list[str]] = field(default_factory=list)
    """Names that share one parameter in the whole model."""
    trained: dict[str, torch.Size] = field(default_factory=dict)
    """Shapes of the trained parameters of the whole model, in its order."""
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    """Of every parameter of the whole model."""
    received: torch.Tensor | None = None
    """The hidden states that the last forward took, whose gradient is the stage before's."""
    handed: torch.Tensor | None = None
    """Those that it gave."""
    ends: list[nn.Module] = field(default_factory=list)
    """The first own block, and the last one."""

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.count - 1

    def connect(self, take: Take, give: Give) -> None:
        """Have forwards exchange hidden states with the neighbouring stages. Call it when the model is wrapped: a
        strategy's own hooks see what comes from there."""

        def enter(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            self.received = take(args[0].shape)
            if not torch.is_grad_enabled():
                return (self.received, *args[1:])
            # Autocast keeps its cast of a leaf: layers that read hidden states directly would share it, and their
            # gradients be added up in 16 bits.
            return (torch.ops.aten.alias(self.received.requires_grad_()), *args[1:])

        def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if not isinstance(output, torch.Tensor):
                raise RunFailed(
                    f"strategy.mesh.pipeline: {type(module).__name__} gives a {type(output).__name__}, where a stage "
                    "ends with hidden states"
                )
            self.handed = output
            give(output.detach())

        if not self.first:
            self.ends[0].register_forward_pre_hook(enter, prepend=True)
        if not self.last:
            self.ends[1].register_forward_hook(leave)

    def taken(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What the last forward received and handed on, which is forgotten here."""
        ends = self.received, self.handed
        self.received = self.handed = None
        return ends


def cut(
    model: nn.Module,
    blocks: list[tuple[str, nn.Module]],
    index: int,
    count: int,
    source: str,
    dtype: torch.dtype | None = None,
) -> Stage:
    """Leave stage ``index`` of ``count`` in ``model``: its blocks, on the first stage the embedding, on the last one
    the norm and the head. ``blocks``: all of the model's, by name, in order. ``dtype``: of hidden
    states, where it is not that of the embedding.

    Call it when the model is ready otherwise: adapters, checkpointing. Raises InputError for a model of another
    structure, and where a stage would have nothing to train.
    """
    where = f"{source}: strategy.mesh.pipeline"
    if len(blocks) < count:
        raise InputError(f"{where}: the model has {len(blocks)} blocks, and each stage needs one")
    parts = stage_blocks(len(blocks), count)
    embedding, after = _ends(model, where)
    names = {name: stage for stage, part in enumerate(parts) for name, _ in (blocks[at] for at in part)}
    names |= dict.fromkeys(embedding, 0) | dict.fromkeys(after, count - 1)
    places = _places(model, names, where)
    stage = Stage(
        index,
        count,
        parts[index],
        own={name: p for name, p in model.named_parameters() if index in places[name]},
        owners={name: min(places[name]) for name, _ in model.named_parameters()},
        shared=[name for name, found in places.items() if len(found) > 1],
        tied=_tied(model),
        trained={name: p.shape for name, p in model.named_parameters() if p.requires_grad},
        dtypes={name: p.dtype for name, p in model.named_parameters()},
        ends=[blocks[parts[index][0]][1], blocks[parts[index][-1]][1]],
    )
    for at in range(count):
        if not any(at in places[name] for name in stage.trained):
            raise InputError(f"{where}: nothing trains in stage {at + 1} of {count}; set fewer stages, or train more")
    for at, (name, block) in enumerate(blocks):
        if at not in stage.blocks:
            model.set_submodule(name, _Passed(block))
    for name in embedding if not stage.first else ():
        model.set_submodule(name, _NoEmbedding(model.get_submodule(name), dtype))
    if not stage.last:
        *norms, head = after
        for name in norms:
            model.set_submodule(name, nn.Identity())
        model.set_submodule(head, _NoHead())
    own = {id(parameter): name for name, parameter in stage.own.items()}
    stage.names = {name: own[id(p)] for name, p in model.named_parameters() if own[id(p)] != name}
    return stage


def _ends(model: Any, where: str) -> tuple[list[str], list[str]]:
    """Names of the modules before the blocks, and of those after them, the head last."""
    base, prefix = transformers_base(model)
    plan = list(getattr(base.config, "base_model_pp_plan", None) or {})
    if plan != ["embed_tokens", "layers", "norm"]:
        raise InputError(f"{where}: {type(base).__name__} has no plan of an embedding, blocks and a norm")
    head = model.get_output_embeddings()
    at = next(name for name, module in model.named_modules() if module is head)
    return [f"{prefix}embed_tokens"], [f"{prefix}norm", at]


def _places(model: nn.Module, stages: dict[str, int], where: str) -> dict[str, set[int]]:
    """Of every parameter the stages that have it, by its first name. ``stages``: by the name of a module."""
    places: dict[int, set[int]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        stage = next((at for module, at in stages.items() if name.startswith(f"{module}.")), None)
        if stage is None:
            raise InputError(f"{where}: {name} is in no block, and no part of an embedding, a norm or a head")
        places.setdefault(id(parameter), set()).add(stage)
    return {name: places[id(parameter)] for name, parameter in model.named_parameters()}


def _tied(model: nn.Module) -> list[list[str]]:
    sharing: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        sharing.setdefault(id(parameter), []).append(name)
    return [sorted(names) for names in sharing.values() if len(names) > 1]


class _Passed(nn.Module):
    """A block that another stage computes: hidden states pass through. Models read ``attention_type`` of a block."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.attention_type = getattr(block, "attention_type", None)

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden


class _NoEmbedding(nn.Module):
    """In place of an embedding: hidden states of its shape and dtype without values, in the memory of one."""

    def __init__(self, embedding: Any, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.width, self.dtype = int(embedding.weight.shape[1]), dtype or embedding.weight.dtype

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), dtype=self.dtype, device=ids.device).expand(*ids.shape, self.width)


class _NoHead(nn.Module):
    """In place of a head: the loss of this stage, which is none."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        answer_wanted()
        return torch.zeros((), dtype=torch.float32, device=hidden.device)
