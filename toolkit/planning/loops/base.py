"""A training loop that a plan can be made for: how it computes the loss of a micro-batch, traced as it runs."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from toolkit.recipe.resolve import Precision, Resolved
from toolkit.strategies import resolve

if TYPE_CHECKING:
    import torch
    from torch import nn

    from toolkit.model.loss_terms import LossTerms

    Loss = Callable[[nn.Module, Any, Mapping[str, torch.Tensor], str, LossTerms], torch.Tensor]
    Acting = Callable[[nn.Module], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class Deferred:
    """A function of a module that imports torch, which is imported when it is called: a plan from kept traces calls
    none."""

    module: str
    name: str

    def __call__(self, *args: Any, **options: Any) -> Any:
        return getattr(importlib.import_module(self.module), self.name)(*args, **options)


@dataclass(frozen=True)
class Together:
    """Two contexts around a trace, the first one outside."""

    first: Callable[[Any], Any]
    second: Callable[[Any], Any]

    def __call__(self, model: Any) -> Any:
        from toolkit.planning.loops.bare import both

        return both(self.first(model), self.second(model))


@dataclass(frozen=True)
class LoopPrecision(Precision):
    """The dtypes of a loop that autocasts, or does not, whatever the trained weights are in. ``packed``: the dtype that
    4-bit weights are unpacked in. ``norms``: that of frozen weights of one dimension, "" if it is ``frozen``."""

    autocast: bool = False
    packed: str = "bfloat16"
    norms: str = ""

    @property
    def everywhere(self) -> bool:
        return self.autocast

    @property
    def vectors(self) -> str:
        return self.norms or self.frozen

    @property
    def mixed(self) -> bool:
        return self.autocast

    @property
    def unpacked(self) -> str:
        return self.packed


def as_resolved(resolved: Resolved) -> Precision:
    """The recipe's own precision."""
    return resolved.precision


def _nothing(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext()


def _all(resolved: Resolved) -> str:
    return ""


@dataclass(frozen=True)
class Loop:
    """``loss``: from the model to the loss, with what is alive meanwhile. ``source``: where its code is. ``precision``:
    the dtypes that it trains a recipe in. ``acting``: entered while its model is traced. ``reentrant``: whether blocks
    are checkpointed with ``use_reentrant=True``. ``strategies``: those that it has, or that plan knows of it; (): all.
    ``optimizers``: the names of those that it has; None: those of the Trainer. ``namesakes``: those
    that it has under the same name, with another algorithm. ``kernel``: of its optimizer, where the
    recipe names none; "": the recipe's default. ``unknown``: keys that it has something for whose memory plan does not
    know. ``refuses``: what else it cannot train, "" if nothing. ``model``: makes a model of its own, with adapters and
    what is frozen; None: transformers' is trained. ``sync``: when gradients are summed over ranks (``strategy.sync``),
    where the recipe does not say. ``one_group``: its optimizer has one group of all weights, which decays.
    ``wraps_layers``: under fsdp1 each layer that trains beside frozen weights is a unit by itself, as PEFT's policy has
    it. ``double_quant``: whether the statistics of its 4-bit weights are quantised too. ``tf32``: whether products of
    float32 are computed in TF32. ``eval_micro``: rows of a
    batch of its evaluation; 0: those of a micro-batch, which take less than a step. ``eval_kept``: batches whose
    logits stay on the device until the evaluation, or the part of it that goes to the host together, is over.
    ``concatenates``: whether they are one tensor, which is copied with each batch; else a list. ``returns_logits``:
    whether an evaluation has any. ``float32_outputs``: whether they are copied to float32 where the forward runs
    under autocast."""

    loss: Loss
    title: str
    source: str
    precision: Callable[[Resolved], Precision] = as_resolved
    acting: Acting = _nothing
    reentrant: bool = False
    strategies: tuple[str, ...] = ()
    optimizers: tuple[str, ...] | None = None
    kernel: str = ""
    namesakes: frozenset[str] = frozenset()
    unknown: frozenset[str] = frozenset()
    refuses: Callable[[Resolved], str] = _all
    model: Callable[[Resolved], nn.Module] | None = None
    sync: str = ""
    one_group: bool = False
    wraps_layers: bool = True
    double_quant: bool = True
    tf32: bool = False
    eval_micro: int = 0
    eval_kept: int = 0
    concatenates: bool = True
    returns_logits: bool = True
    float32_outputs: bool = True

    @property
    def holds_outputs(self) -> bool:
        """Whether what the model returns is a variable that lives until the next step."""
        return isinstance(self.acting, Together)

    def trained(self, resolved: Resolved) -> Resolved:
        """``resolved`` as this loop trains it: its dtypes and its optimizer's kernel."""
        recipe = resolved.recipe
        section, strategy = recipe.optimizer, recipe.strategy
        if self.kernel and "kernel" not in section.model_fields_set:
            section = section.model_copy(update={"kernel": self.kernel})
        if self.one_group and section.decay != "all":
            section = section.model_copy(update={"decay": "all"})
        summed_once = resolved.traits.distributed and resolved.accumulation > 1
        if self.sync and summed_once and "sync" not in strategy.model_fields_set:
            strategy = strategy.model_copy(update={"sync": self.sync})
        if (section, strategy) != (recipe.optimizer, recipe.strategy):
            recipe = recipe.model_copy(update={"optimizer": section, "strategy": strategy})
            resolved = resolve(recipe, resolved.source, device=resolved.device)
        return replace(resolved, precision=self.precision(resolved))
