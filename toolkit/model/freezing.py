"""`model.freeze`: parameters that are not trained, chosen by patterns on their names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from toolkit.errors import InputError


@dataclass(frozen=True)
class Frozen:
    """What one pattern has frozen; a parameter that several match counts for the first of them."""

    pattern: str
    tensors: int
    parameters: int

    def to_json(self) -> dict[str, Any]:
        """The pattern with its counts."""
        return asdict(self)


def freeze_matching(model: nn.Module, patterns: Sequence[str], source: str) -> list[Frozen]:
    """Freeze every trainable parameter in whose name one of ``patterns`` is found. Call before sharding.

    Parameters that share storage have one name, the first in the model. Raises InputError for a pattern that matches no
    trainable parameter, and if nothing is left to train.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    left, found = dict(trained), []
    for at, pattern in enumerate(patterns):
        matching = [name for name in trained if re.search(pattern, name)]
        if not matching:
            raise InputError(f"{source}: model.freeze[{at}]: {pattern!r} {_why_nothing(model, pattern, trained)}")
        own = {name: left.pop(name) for name in matching if name in left}
        found.append(Frozen(pattern, len(own), sum(p.numel() for p in own.values())))
    if patterns and not left:
        raise InputError(
            f"{source}: model.freeze: the patterns match all {len(trained)} trainable parameters: nothing is left to "
            f"train; {_SMALL}"
        )
    for name, parameter in trained.items():
        parameter.requires_grad_(name in left)
    return found


_SMALL = "the small model of `verify` has fewer layers: use --full-size for patterns that name layers"


def _why_nothing(model: nn.Module, pattern: str, trained: dict[str, nn.Parameter]) -> str:
    first = {id(p): name for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if re.search(pattern, name) and first[id(parameter)] in trained:
            return f"matches {name}, which is the same weight as {first[id(parameter)]}; use the latter name"
    if any(re.search(pattern, name) for name in first.values()):
        return "matches only parameters that are not trained anyway; remove it"
    return f"matches no parameter (the names are like {next(iter(trained), 'none')!r}); {_SMALL}"
