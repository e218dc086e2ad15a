"""Which tensor of another tool's checkpoint is which of the recipe's model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from toolkit.errors import InputError
from toolkit.model.sources import source_of
from toolkit.strategies.engines.prepared import Prepared
from toolkit.verification.checkpoints.contents import MOMENTS, Checkpoint, StoredTensor
from toolkit.verification.checkpoints.names import with_canonical_names, with_common_prefix
from toolkit.verification.checkpoints.numbered import name_moments

_SHOWN = 3


@dataclass(frozen=True)
class Matched:
    """By the model's own names: what trains, its moments, and what the checkpoint says of frozen weights."""

    checkpoint: Checkpoint
    weights: dict[str, StoredTensor]
    moments: dict[str, dict[str, StoredTensor]]
    """By name, then ``exp_avg`` and ``exp_avg_sq``."""
    frozen: dict[str, StoredTensor]
    decay: dict[str, float]
    unused: tuple[str, ...]
    """Names of the checkpoint that the model does not have."""


def match(checkpoint: Checkpoint, prepared: Prepared) -> Matched:
    """Raises InputError if a trained tensor or a moment is missing, or has another shape."""
    # PEFT keeps a frozen copy of a module that it trains whole; no checkpoint is of that.
    parameters = {n: p for n, p in prepared.model.named_parameters() if ".original_module." not in n}
    own = Checkpoint(checkpoint.path, "recipe", {name: _described(p) for name, p in parameters.items()})
    own.order = tuple(prepared.trainable())
    theirs, ours = with_common_prefix(checkpoint, with_canonical_names(own))
    names = dict(zip(ours.weights, parameters, strict=True))  # renaming keeps the order
    name_moments(theirs, ours)
    trained = prepared.trainable()
    weights = {names[name]: tensor for name, tensor in theirs.weights.items() if name in names}
    moments: dict[str, dict[str, StoredTensor]] = {name: {} for name in trained}
    _check(checkpoint.path, "weight", trained, weights)
    for moment in MOMENTS if theirs.has_moments else ():
        found = {names[name]: tensor for name, tensor in theirs.moments[moment].items() if name in names}
        _check(checkpoint.path, moment, trained, found)
        for name in trained.keys() & found.keys():
            moments[name][moment] = found[name]
    return Matched(
        theirs,
        {name: weights[name] for name in trained},
        moments if theirs.has_moments else {},
        {name: tensor for name, tensor in weights.items() if name not in trained},
        {names[name]: decay for name, decay in theirs.decay.items() if name in names},
        tuple(name for name in theirs.weights if name not in names),
    )


def _described(parameter: torch.Tensor) -> StoredTensor:
    def read() -> torch.Tensor:
        source = source_of(parameter)
        return source.whole() if source is not None else parameter.detach()

    return StoredTensor(tuple(parameter.shape), parameter.dtype, read)


def _check(path: Path, what: str, trained: Mapping[str, torch.Tensor], found: Mapping[str, StoredTensor]) -> None:
    absent = [name for name in trained if name not in found]
    if absent:
        shown = ", ".join(absent[:_SHOWN]) + (", …" if len(absent) > _SHOWN else "")
        raise InputError(
            f"{path}: no {what} of {len(absent)} of {len(trained)} trained tensors ({shown}); is it this model's?"
        )
    for name, parameter in trained.items():
        here, there = list(parameter.shape), list(found[name].shape)
        if here != there:
            raise InputError(f"{path}: {what} of {name} has shape {there}, the recipe's model has {here}")


def other_frozen(matched: Matched, prepared: Prepared) -> str | None:
    """The first frozen weight whose values are not those of the recipe's model, or None. Where one side keeps a weight
    in 16 bits, both are compared in these."""
    parameters = dict(prepared.model.named_parameters())
    for name, tensor in matched.frozen.items():
        base = _described(parameters[name])
        if base.shape != tensor.shape:
            return name
        here, there = base.read(), tensor.read()
        for dtype in (one.dtype for one in (base, tensor) if one.dtype.itemsize < 4):
            here, there = here.to(dtype), there.to(dtype)
        if not torch.equal(here.float(), there.float()):
            return name
    return None
