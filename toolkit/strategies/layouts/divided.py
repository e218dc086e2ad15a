"""Layouts in which ranks divide weights, and a strategy shards or copies the parts.

To the strategy's engine a part is a weight. ``Divided`` gives and takes whole weights: it gathers them from the ranks
that divide them, and keeps this rank's part of what it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from toolkit.model.tensor import Division
from toolkit.recipe.resolve import Resolved
from toolkit.strategies.engines.base import Engine, OptimizerState
from toolkit.strategies.engines.pieces import Owned, Piece, Places, Saved, Shape, Values, within
from toolkit.strategies.engines.prepared import Prepared

if TYPE_CHECKING:
    from accelerate import Accelerator


class Divided(Engine):
    """What an engine does otherwise where other ranks than those that shard divide some of the weights; comes before it
    among the base classes."""

    def __init__(self, prepared: Prepared, accelerator: Accelerator) -> None:
        self.divisions = prepared.divisions
        self.layer_group = self._group(prepared.resolved)
        super().__init__(prepared, accelerator)
        self.shapes = {name: self._whole_shape(name, shape) for name, shape in self.parts.items()}

    def _group(self, resolved: Resolved) -> dist.ProcessGroup:
        """Of the ranks that divide weights with this one. Every process calls it."""
        raise NotImplementedError

    # ------------------------------------------------------------------ the step

    def clip(self, max_norm: float) -> torch.Tensor:
        norm = self.squares(list(self.parameters)).sqrt()
        self.scale_down(max_norm, norm)
        return norm

    def scale_down(self, max_norm: float, norm: torch.Tensor) -> None:
        if max_norm > 0:
            for inside in (True, False):  # shards of the two may be of different device meshes
                own = [p for name, p in self.parameters.items() if (name in self.divisions) == inside]
                torch.nn.utils.clip_grads_with_norm_(own, max_norm, norm)

    def squares(self, names: Iterable[str]) -> torch.Tensor:
        """The squared 2-norm of the whole gradients of these weights; float32."""
        found = [(name, p.grad) for name in names if (p := self.parameters[name]).grad is not None]
        divided = square([gradient for name, gradient in found if name in self.divisions], self.device)
        _over_ranks(divided, self.layer_group)
        return divided + square([gradient for name, gradient in found if name not in self.divisions], self.device)

    # ------------------------------------------------------------------ whole tensors

    def full_weight(self, name: str, main_only: bool = False) -> torch.Tensor:
        return self._joined(name, super().full_weight(name), main_only)

    def full_gradient(self, name: str) -> torch.Tensor | None:
        gradient = super().full_gradient(name)
        return None if gradient is None else self._joined(name, gradient, False)

    def full_state(self, name: str, scales: bool = False, main_only: bool = False) -> OptimizerState | None:
        state = super().full_state(name, scales)
        if state is None:
            return None
        return replace(state, moments={key: self._joined(name, m, main_only) for key, m in state.moments.items()})

    def load(self, name: str, weight: torch.Tensor, state: OptimizerState | None) -> None:
        if (division := self.divisions.get(name)) is not None:
            weight = division.part(weight)
            if state is not None:
                state = replace(state, moments={key: division.part(m) for key, m in state.moments.items()})
        super().load(name, weight, state)

    def own_weight(self, name: str) -> Values:
        return self._placed(name, super().own_weight(name))

    def own_gradient(self, name: str) -> Values:
        return self._placed(name, super().own_gradient(name))

    def pieces(self, name: str) -> Owned:
        own = super().pieces(name)
        return Owned(
            self._placed(name, own.weight),
            {key: self._placed(name, moment) for key, moment in own.moments.items()},
            {key: self._whole_shape(name, shape) for key, shape in own.shapes.items()},
            own.step,
        )

    def load_pieces(self, name: str, saved: Saved) -> None:
        if (division := self.divisions.get(name)) is None:
            super().load_pieces(name, saved)
            return
        shape = self.parts[name]

        def read(whole: Callable[[Piece | None], torch.Tensor], piece: Piece | None) -> torch.Tensor:
            asked = piece or Piece((0,) * len(shape), shape)
            found = [(whole(one).reshape(-1), places) for one, places in _of_whole(asked, shape, division)]
            flat = torch.empty(asked.numel, dtype=found[0][0].dtype)
            for values, places in found:
                flat[places] = values
            return flat if asked.flat else flat.view(asked.size)

        super().load_pieces(
            name,
            Saved(
                saved.step,
                lambda piece: read(saved.weight, piece),
                lambda key, piece: read(lambda one: saved.moment(key, one), piece),
            ),
        )

    def _whole_shape(self, name: str, shape: Shape) -> Shape:
        division = self.divisions.get(name)
        return shape if division is None else division.whole(shape)

    def _joined(self, name: str, part: torch.Tensor, main_only: bool) -> torch.Tensor:
        """The whole of this rank's part; on the CPU, or without values where this rank has no use for them."""
        division = self.divisions.get(name)
        if division is not None:
            parts = [torch.empty_like(part, device=self.device) for _ in range(division.count)]
            dist.all_gather(parts, part.contiguous().to(self.device), group=self.layer_group)
            part = division.join(parts).cpu()
        return part if self._reads(main_only) else torch.empty_like(part, device="meta")

    def _placed(self, name: str, values: Values) -> Values:
        """Pieces of this rank's part as pieces of the whole. Of weights that all ranks have, the first rank's."""
        division = self.divisions.get(name)
        if division is None:
            return values if self.resolved.mesh.column(self.accelerator.process_index) == 0 else []
        placed = []
        for piece, tensor in values:
            flat = tensor.reshape(-1)
            for one, places in _of_whole(piece, self.parts[name], division):
                placed.append((one, flat[places]))
        return placed


def _of_whole(piece: Piece, shape: Shape, division: Division) -> Iterator[tuple[Piece, Places]]:
    """A piece of this rank's part, which has ``shape``, as pieces of the whole."""
    return within(piece, shape, division.dim, division.index, division.count, division.runs)


def _over_ranks(squares: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Of divided weights each rank has the squares of its own part."""
    dist.all_reduce(squares, group=group)


def square(gradients: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The squared 2-norm of gradients, summed over the ranks that shard them; float32."""
    if not gradients:
        return torch.zeros((), device=device)
    norm = torch.nn.utils.get_total_norm(gradients)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).float().square()
