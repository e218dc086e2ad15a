"""Whole tensors of a DeepSpeed ZeRO engine: master weights, gradients and moments, read and written by parameter.

DeepSpeed's own accessors do the reading (``deepspeed.utils.safe_get_full_*``) and, where they can, the writing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from toolkit.model.sources import Source, fill
from toolkit.optim.adamw import step_count
from toolkit.optim.placed import Place
from toolkit.strategies.engines.base import on_host, owned
from toolkit.strategies.engines.pieces import Piece, Values, span
from toolkit.upstream import deepspeed as upstream


class ZeroTensors:
    """Access by parameter to what ZeRO keeps in flat partitions. Every rank calls every method; what is read is on the
    CPU, or on the meta device where this rank has no use for the values (``reads`` False)."""

    def __init__(self, engine: Any) -> None:
        self.stage = int(engine.zero_optimization_stage())
        self.device: torch.device = engine.device
        self.zero: Any = engine.optimizer
        self.inner: torch.optim.Optimizer = engine.optimizer.optimizer

    def weight(self, parameter: nn.Parameter, reads: bool = True) -> torch.Tensor:
        from deepspeed.utils import safe_get_full_fp32_param

        # Below stage 3 DeepSpeed puts whole tensors together in float32, whatever dtype it keeps them in.
        return on_host(safe_get_full_fp32_param(parameter), reads).to(self.masters()[0].dtype)

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The accumulated gradient as the optimizer will read it, loss scale still in it."""
        from deepspeed.utils import safe_get_full_grad

        grad = safe_get_full_grad(parameter)
        kept = getattr(self.zero, "gradient_accumulation_dtype", None)
        return None if grad is None else on_host(grad).to(kept or grad.dtype)

    def moment(self, parameter: nn.Parameter, key: str, reads: bool = True) -> torch.Tensor | None:
        from deepspeed.utils import safe_get_full_optimizer_state

        if not self._has_state(key):
            return None
        self._link_state()
        dtype = next(state[key].dtype for state in self.inner.state.values() if key in state)
        return on_host(safe_get_full_optimizer_state(parameter, key), reads).to(dtype)

    def set_weight(self, parameter: nn.Parameter, weight: torch.Tensor) -> None:
        """Set the master weight and the copy that the next forward uses."""
        import deepspeed

        self._write(parameter, weight, None)
        if self.stage < 3:
            parameter.data.copy_(weight)
            return
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if dist.get_rank() == 0:
                parameter.data.copy_(weight)

    def set_moment(self, parameter: nn.Parameter, key: str, value: torch.Tensor) -> None:
        self._write(parameter, value, key)

    def _write(self, parameter: nn.Parameter, value: torch.Tensor, key: str | None) -> None:
        from deepspeed import utils

        if self.stage < 3:
            if key is None:
                utils.safe_set_full_fp32_param(parameter, value.to(self.device))
            else:
                utils.safe_set_full_optimizer_state(parameter, value.to(self.device), key)
            return
        # DeepSpeed 0.19.8 cannot write a whole tensor whose size the ranks do not divide; its local setter can.
        piece = self._piece(parameter)
        self._set_partition(parameter, key, value.reshape(-1)[piece.start[0] :][: piece.numel])

    # ------------------------------------------------------------------ this rank's partition; no communication

    def own(self, parameter: nn.Parameter, key: str | None = None) -> Values:
        """This rank's part of the master weight, or of a moment: a view, or with stage 3's offload a copy on the
        device."""
        piece = self._piece(parameter)
        if not piece.numel:
            return []
        values = self._partition(parameter, key)
        return owned(piece, values.detach().reshape(-1)[: piece.numel])

    def own_gradient(self, parameter: Any) -> Values:
        """This rank's part of the accumulated gradient, loss scale still in it; nothing if there is none."""
        piece = self._piece(parameter)
        if not piece.numel:
            return []
        if self.stage == 3:
            from deepspeed.utils import safe_get_local_grad

            found = safe_get_local_grad(parameter)
        else:
            found = upstream.gradient_of(parameter)
        if found is None:
            return []
        flat = found.detach().reshape(-1)
        # BF16_Optimizer keeps a whole gradient on each rank.
        first = piece.start[0] if self.stage < 3 and flat.numel() == parameter.numel() else 0
        return owned(piece, flat[first : first + piece.numel])

    def own_moments(self, parameter: nn.Parameter, keys: Sequence[str]) -> dict[str, Values] | None:
        """This rank's part of each moment; None before the first update."""
        if not keys or not all(self._has_state(key) for key in keys):
            return None
        self._link_state()
        return {key: self.own(parameter, key) for key in keys}

    def load_weight(self, parameter: nn.Parameter, read: Callable[[Piece | None], torch.Tensor]) -> None:
        """Set this rank's part of the master weight, and what it holds of the copy that the next forward uses: below
        stage 3 all of it."""
        piece = self._piece(parameter)
        if self.stage < 3:
            weight = read(None)
            if piece.numel:
                self._partition(parameter, None).copy_(weight.reshape(-1)[piece.start[0] :][: piece.numel])
            parameter.data.copy_(weight)
            return
        mine = read(piece)
        self.load_master(parameter, mine)
        _set_shard(parameter, mine)

    def load_master(self, parameter: nn.Parameter, mine: torch.Tensor) -> None:
        """Stage 3: set this rank's part of the master weight alone."""
        self._set_partition(parameter, None, mine)

    def load_moment(self, parameter: nn.Parameter, key: str, read: Callable[[str, Piece | None], torch.Tensor]) -> None:
        """Set this rank's part of a moment."""
        piece = self._piece(parameter)
        if self.stage == 3:
            self._set_partition(parameter, key, read(key, piece))
        elif piece.numel:
            self._partition(parameter, key).copy_(read(key, piece))

    def _piece(self, parameter: Any) -> Piece:
        """Which elements of the flattened weight this rank updates."""
        if self.stage == 3:
            return partition(parameter)
        fragment = upstream.fragment_of(parameter)
        if fragment is None:
            return span(0, 0)
        address = fragment.lp_fragment_address
        return span(address.start, address.start + address.numel)

    def _partition(self, parameter: Any, key: str | None) -> torch.Tensor:
        """What this rank updates, flat; under stage 3 padded to equal sizes on all ranks."""
        from deepspeed import utils

        if self.stage < 3:
            found: torch.Tensor = upstream.fragment_of(parameter).get_hp_fragment(key)
        elif key is None:
            found = utils.safe_get_local_fp32_param(parameter)
        else:
            found = utils.safe_get_local_optimizer_state(parameter, key)
        return found.detach()

    def _set_partition(self, parameter: Any, key: str | None, values: torch.Tensor) -> None:
        """Stage 3: set what this rank updates, zeros in the padding."""
        from deepspeed import utils

        mine = torch.zeros(parameter.partition_numel(), dtype=torch.float32)
        mine[: values.numel()] = values
        if key is None:
            utils.safe_set_local_fp32_param(parameter, mine.to(self.device))
        else:
            utils.safe_set_local_optimizer_state(parameter, mine.to(self.device), key)

    def masters(self) -> list[torch.Tensor]:
        """The flat partitions of master weights that this rank updates."""
        for attribute in (
            "fp32_partitioned_groups_flat",  # stage 3
            "single_partition_of_fp32_groups",  # stages 1 and 2
            "fp32_groups_flat_partition",  # stage 1 under bf16 (BF16_Optimizer)
        ):
            if hasattr(self.zero, attribute):
                return list(getattr(self.zero, attribute))
        raise AssertionError(f"unknown ZeRO optimizer {type(self.zero).__name__}")

    def places(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[tuple[torch.Tensor, list[Place]]]:
        """Each of ``masters``, and which elements of which weights it has."""
        flats = self.masters()
        found: list[list[Place]] = [[] for _ in flats]
        for name, parameter in parameters.items():
            piece = self._piece(parameter)
            if not piece.numel:
                continue
            part = self._partition(parameter, None)
            offsets = [int(part.storage_offset() - flat.storage_offset()) for flat in flats]
            inside = [
                at
                for at, flat in enumerate(flats)
                if part.untyped_storage() is flat.untyped_storage() and 0 <= offsets[at] <= flat.numel() - piece.numel
            ]
            if len(inside) != 1:
                raise AssertionError(f"{name}: its part is in {len(inside)} of {len(flats)} partitions")
            found[inside[0]].append(Place(name, piece.start[0], offsets[inside[0]], piece.numel))
        yield from zip(flats, found, strict=True)

    def held(self, key: str) -> list[torch.Tensor | None]:
        """One tensor of the optimizer's state for each of ``masters``; None where there is none."""
        return [(self.inner.state.get(flat) or {}).get(key) for flat in self.masters()]

    def refresh(self, parameters: Iterable[nn.Parameter]) -> None:
        """Make the weights that forwards use from the masters."""
        if self.stage < 3:
            self.zero.update_lp_params()
            return
        for parameter in parameters:
            piece = self._piece(parameter)
            _set_shard(parameter, self._partition(parameter, None).reshape(-1)[: piece.numel])

    def make_state(self, keys: Sequence[str], counts: bool) -> None:
        """Give the inner optimizer zero state before its first step, so that there is state to write to. ``counts``: it
        has a count of steps."""
        for flat in self.masters():
            if flat not in self.inner.state:
                self.inner.state[flat] = {
                    **({"step": step_count(self.inner, flat, 0)} if counts else {}),
                    **{key: torch.zeros_like(flat) for key in keys},
                }
        self._link_state()

    def _link_state(self) -> None:
        if self.stage < 3:
            upstream.link_moments(self.zero)

    def step_count(self) -> int:
        return max((int(state["step"]) for state in self.inner.state.values() if "step" in state), default=0)

    def set_step_count(self, step: int) -> None:
        for state in self.inner.state.values():
            if "step" in state:
                state["step"].fill_(float(step))

    def _has_state(self, key: str) -> bool:
        return any(isinstance(state.get(key), torch.Tensor) for state in self.inner.state.values())


def _set_shard(parameter: Any, mine: torch.Tensor) -> None:
    """Stage 3: set this rank's part of the weight that a forward gathers."""
    parameter.ds_tensor.data[: mine.numel()].copy_(mine)
    parameter.partition(param_list=[parameter])  # a small weight is kept whole: the next forward gathers it again
    parameter.ds_secondary_tensor = None  # hpZ: of the old weights; the next gather makes another


def partition(parameter: Any) -> Piece:
    """Stage 3: which elements of the flattened weight this rank has."""
    size, total = parameter.partition_numel(), parameter.ds_numel
    start = min(size * dist.get_rank(), total)
    return span(start, min(start + size, total))


def fill_partition(parameter: Any, source: Source) -> None:
    """Stage 3: read this rank's part of the weight that a forward gathers, and with hpZ its part of the group's second
    copy. The padding stays as it is."""
    piece = partition(parameter)
    fill(parameter.ds_tensor.data.view(-1)[: piece.numel], source, piece.start[0])
    copy = parameter.ds_secondary_tensor
    if copy is not None:
        start = min(copy.numel() * (dist.get_rank() % parameter.ds_secondary_tensor_group_size), parameter.ds_numel)
        stop = min(start + copy.numel(), parameter.ds_numel)
        fill(copy.data.view(-1)[: stop - start], source, start)
