"""What an option does in the plain loop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch


class PlainOption:
    """An option of a recipe as the plain loop has it; frozen, so that a mistake is another one."""

    @contextlib.contextmanager
    def around(self, model: Any, inputs: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Inside, a forward of ``model`` on ``inputs`` has the option if the model is in training mode."""
        yield

    def mistakes(self) -> list[tuple[str, dict[str, object], PlainOption]]:
        """What a diagnosis tries out: its id, its facts, and the option with that mistake."""
        return []
