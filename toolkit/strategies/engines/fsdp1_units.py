"""Which weights FSDP1 shards, gathers and reduces together, as one flat parameter: a unit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from toolkit.upstream.torch_fsdp import ignore_no_more, is_flattened, units_by


class OwnUnits:
    """Units of ``model``: each of its ``blocks``, by the names of their classes; where part of the model is frozen,
    what trains of a block by itself, and each trained layer outside of the blocks. The root has the rest.

    A flat parameter has one dtype («Must flatten tensors with uniform dtype», torch 2.13.0), and one that trains in
    part has a gradient for all of it, the frozen base's with it.
    """

    def __init__(self, model: nn.Module, blocks: frozenset[str]) -> None:
        self._model, self._blocks = model, blocks
        self._apart = any(not parameter.requires_grad for parameter in model.parameters())
        self._inside = {id(one) for block in model.modules() if self._is_block(block) for one in block.modules()}

    def _is_block(self, module: nn.Module) -> bool:
        return type(module).__name__ in self._blocks

    def policy(self, module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        """FSDP's ``auto_wrap_policy``."""
        if recurse or self._is_block(module):
            return True
        if not self._apart or id(module) in self._inside or list(module.children()):
            return False
        return any(parameter.requires_grad for parameter in module.parameters(recurse=False))

    @contextlib.contextmanager
    def divided(self) -> Iterator[None]:
        """Context in which FSDP puts what is frozen of a block into a unit around that of what trains: two collectives,
        where each layer of an adapter by itself has some fourteen.

        In the backward a unit's weights are gathered while the unit after it in the order of the forwards' ends
        computes (torch 2.13.0, ``get_handle_to_backward_prefetch``): the frozen unit around the other is the one that
        the next block has before it.
        """

        def divided(right: Any, module: nn.Module, wrapper_cls: Any, **given: Any) -> nn.Module:
            ignored = set(given.pop("ignored_states", ()))
            own = [p for p in module.parameters() if p not in ignored and not is_flattened(p)]
            frozen = {parameter for parameter in own if not parameter.requires_grad}
            if self._is_block(module) and 0 < len(frozen) < len(own):
                inner: Any = right(module, wrapper_cls, ignored_states=ignored | frozen, **given)
                ignore_no_more(inner, frozen)
                module = inner
            made: nn.Module = right(module, wrapper_cls, ignored_states=ignored, **given)
            return made

        with units_by(divided):
            yield

    def frozen_in_part(self) -> tuple[str, str] | None:
        """A trained and a frozen parameter that would be in one flat parameter; None if there are none."""
        units: dict[str, dict[bool, str]] = {}

        def walk(module: nn.Module, name: str, unit: str) -> None:
            if self._is_block(module):
                return
            if self.policy(module, False, 0):
                unit = name
            for key, parameter in module.named_parameters(prefix=name, recurse=False):
                units.setdefault(unit, {}).setdefault(parameter.requires_grad, key)
            for key, child in module.named_children():
                walk(child, f"{name}.{key}" if name else key, unit)

        walk(self._model, "", "")
        return next(((found[True], found[False]) for found in units.values() if len(found) > 1), None)
