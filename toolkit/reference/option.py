"""What an option does in the plain loop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch

from toolkit.reference.meeting import Meeting


class PlainOption:
    """An option of a recipe as the plain loop has it; frozen, so that a mistake is another one."""

    orders: ClassVar[bool] = False
    """Whether ``around`` changes nothing but the order of sums: of a layout, the parts that its ranks add up. Where the
    plain loop is held against its own order, it is left out."""
    roundings: ClassVar[int] = 0
    """Of ``shadow`` in float32, each of a number of the weight's or the result's size."""

    @contextlib.contextmanager
    def around(self, model: Any, inputs: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Inside, a forward of ``model`` on ``inputs`` has the option if the model is in training mode."""
        yield

    @contextlib.contextmanager
    def on_rank(self, model: Any, rank: int, samples: bool, meeting: Meeting | None) -> Iterator[None]:
        """Inside, ``model`` computes ``rank``'s micro-batch; without ``samples`` it has none, and its rows count for
        nothing. ``meeting``: where this forward meets those of the other ranks; None: it is alone."""
        yield

    def couples(self, model: Any) -> Literal["", "rank", "ranks"]:
        """Which other rows what ``model`` gives for a row depends on: none, those of its micro-batch, or those of the
        same micro-batch of every rank, whose forwards then meet."""
        return ""

    def running(self, model: Any) -> Mapping[str, torch.Tensor]:
        """Buffers by name that a forward of ``model`` changes: those of rank 0."""
        return {}

    def notes(self, model: Any, resolved: Any) -> list[str]:
        """What `verify` says of it beside the verdict."""
        return []

    def loss_term(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | float:
        """What it adds to the loss: of ``logits`` (tokens, classes), over ``targets`` (tokens,) that are not -100."""
        return 0.0

    def shadow(self, before: torch.Tensor, weight: torch.Tensor, updates: int) -> torch.Tensor:
        """What the option keeps of a weight after so many ``updates``, in float64: from what it kept ``before`` the
        last one, and from the weight after it, both float32 of the weight's shape."""
        raise NotImplementedError

    def loads(self, resolved: Any) -> Any:
        """The Resolved by which the plain model is loaded."""
        return resolved

    def change(self, model: Any, resolved: Any) -> None:
        """Change the plain model in place, before adapters are added."""

    def without(self, model: Any) -> contextlib.AbstractContextManager[None]:
        """Inside, ``model`` computes as if ``change`` had not been called."""
        return contextlib.nullcontext()

    def shaken(self, model: Any, seed: int) -> contextlib.AbstractContextManager[None]:
        """Inside, the operands that the option rounds are off by one rounding of their own dtype each, up or down as
        ``seed`` draws."""
        return contextlib.nullcontext()

    def reset(self, model: Any) -> None:
        """Have ``count`` begin here."""

    def count(self, model: Any, blocks: Sequence[Any]) -> Any:
        """What the option's ``engaged`` is given: how often ``model``, of these ``blocks``, ran what its ``operators``
        stand for."""
        return None

    def mistakes(self) -> list[tuple[str, dict[str, object], PlainOption]]:
        """What a diagnosis tries out: its id, its facts, and the option with that mistake."""
        return []
