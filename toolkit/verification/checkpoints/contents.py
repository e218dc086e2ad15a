"""What a reader gives: the contents of one checkpoint, whichever tool wrote it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

MOMENTS = ("exp_avg", "exp_avg_sq")
HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor on disk. ``read`` gives it whole, on the CPU, in ``shape`` and ``dtype``; nothing is kept.

    ``read`` raises InputError if the file cannot be read.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> StoredTensor:
        """A tensor that is in memory already, or mapped from its file."""
        return cls(tuple(tensor.shape), tensor.dtype, lambda: tensor)


Tensors = dict[str, StoredTensor]


@dataclass(frozen=True)
class Numbered:
    """Moments of an optimizer's ``state_dict``, whose parameters are numbered. ``groups``: numbers by group, in order;
    ``decay``: weight decay by group; ``names``: of the numbers, where the optimizer recorded them."""

    states: dict[int, Tensors]
    groups: tuple[tuple[int, ...], ...]
    decay: tuple[float | None, ...] = ()
    names: dict[int, str] = field(default_factory=dict)


@dataclass
class Checkpoint:
    """Weights and moments by canonical name, and what the checkpoint says of its run.

    ``step``: optimizer steps taken. ``learning_rate``: of the next step, by parameter group. ``peak``: the largest
    learning rate of the schedule. ``compute``: dtype of the forward pass (float32, bfloat16 or float16). ``decay``:
    weight decay by name. ``trained_only``: the format leaves out weights that do not train. ``order``: names in the
    model's own order. ``notes``: what could not be read, and why.
    """

    path: Path
    format: str
    weights: Tensors = field(default_factory=dict)
    moments: dict[str, Tensors] = field(default_factory=lambda: {moment: {} for moment in MOMENTS})
    step: int | None = None
    learning_rate: tuple[float, ...] = ()
    peak: float | None = None
    compute: str | None = None
    decay: dict[str, float] = field(default_factory=dict)
    numbered: Numbered | None = None
    trained_only: bool = False
    order: tuple[str, ...] = ()
    config: Path | None = None
    renamed: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)

    @property
    def has_moments(self) -> bool:
        return any(self.moments.values())

    @property
    def half(self) -> str | None:
        """The 16-bit dtype of the weights, if most of them are stored in one."""
        for name, dtype in HALF.items():
            if self.weights and 2 * sum(one.dtype == dtype for one in self.weights.values()) > len(self.weights):
                return name
        return None

    def renaming(self, names: dict[str, str], rules: Sequence[str]) -> Checkpoint:
        """The same under other names. ``names``: new by old; those that are missing stay. ``rules``: what was done."""

        def moved(tensors: dict[str, Any]) -> dict[str, Any]:
            return {names.get(name, name): value for name, value in tensors.items()}

        return replace(
            self,
            weights=moved(self.weights),
            moments={key: moved(tensors) for key, tensors in self.moments.items()},
            decay=moved(self.decay),
            order=tuple(names.get(name, name) for name in self.order),
            renamed=(*self.renamed, *rules),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "format": self.format,
            "step": self.step,
            "learning_rate": list(self.learning_rate),
            "compute_dtype": self.compute,
            "weights": len(self.weights),
            "moments": {key: len(tensors) for key, tensors in self.moments.items()},
            "renamed": list(self.renamed),
            "notes": self.notes,
        }
