"""Optimizers that update one parameter after the other."""

from __future__ import annotations

from typing import Any

import torch


class EachParameter:
    """``step`` of an optimizer that has ``_step(parameter, group)``: a function of its own for each parameter, so that
    what it gathers or unpacks is freed before the next one's turn."""

    param_groups: list[dict[str, Any]]

    def _step(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update of every parameter that has a gradient; every rank calls it."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)
