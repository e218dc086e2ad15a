"""Records a traced step block by block: bytes and operations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from toolkit.model.checkpointing import checkpoint_blocks
from toolkit.model.operators import operator_name
from toolkit.planning.autocast import ActedAutocast
from toolkit.planning.live import LiveBytes
from toolkit.planning.meter import Meter
from toolkit.planning.reentrant import checkpointed
from toolkit.planning.segments import OUTSIDE, Gradient, Segment
from toolkit.planning.target import acted_device
from toolkit.recipe.schema import CheckpointingName

_SOFTMAX_BACKWARD = "_softmax_backward_data"


class Counter(LiveBytes):
    """Live bytes and, beside them, floating point operations by torch's own formulas: two for a multiply-add of
    matrix products, convolutions and attention, nothing for the rest (torch.utils.flop_counter)."""

    flops = 0

    def __init__(self, owner: Callable[[], Any], acted: ActedAutocast | None) -> None:
        super().__init__(owner, meta=True)
        self._acted = acted
        self.meter = Meter()

    def dispatched(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if self._acted is not None:
            self._acted.check(func, args)
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        if operator_name(func) == _SOFTMAX_BACKWARD and acted_device() == "cuda":
            # The product of gradient and output is a tensor of its own there (aten/src/ATen/native/cuda/SoftMax.cu,
            # ``softmax_backward_cuda_out``); a CPU's kernel has none.
            grad = args[0]
            self.peak = max(self.peak, self.live + sum(t.numel() * t.element_size() for t in (grad, result)))
        self.meter.see(func, args, kwargs, result)


class SegmentTracer:
    """Notes how far the step is (which block, forward or backward) and the bytes alive there."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self._counted = 0
        self._live: Counter | None = None

    def owner(self) -> int:
        return self.segments[-1].block if self.segments else OUTSIDE

    def exchanged(self, size: int) -> None:
        """Count an exchange of so many bytes."""
        self.segments[-1].exchanged += size
        self.segments[-1].exchanges += 1

    def summed(self, size: int) -> None:
        """Count a sum over the ranks that divide layers, or rows given to experts, of so many bytes."""
        self.segments[-1].summed += size
        self.segments[-1].sums += 1

    def begin(self, live: Counter) -> None:
        self._live = live
        self._open(OUTSIDE, False)

    def move(self, block: int, backward: bool) -> None:
        """The step continues in ``block``."""
        self._close()
        self._open(block, backward)

    def end(self) -> None:
        self._close()

    def _open(self, block: int, backward: bool) -> None:
        assert self._live is not None
        self._live.reset_peak()
        self.segments.append(Segment(block, backward, self._live.live, held=dict(self._live.by_owner)))

    def _close(self) -> None:
        assert self._live is not None
        segment = self.segments[-1]
        segment.peak = self._live.peak
        total = self._live.flops
        segment.flops, self._counted = total - self._counted, total
        segment.work = self._live.meter.taken()

    @contextlib.contextmanager
    def watching(
        self, model: nn.Module, blocks: list[nn.Module], kind: CheckpointingName, reentrant: bool = False
    ) -> Iterator[None]:
        """Checkpointing on the blocks, a note at every entry and exit, and gradients taken away once they are
        complete: how long they stay is the strategy's business."""
        handles: list[Any] = []
        stack = contextlib.ExitStack()
        if reentrant and kind == "full":
            stack.enter_context(checkpointed(model, blocks))
        else:
            checkpoint_blocks([("", block) for block in blocks], kind)
        for index, block in enumerate(blocks):
            handles.append(block.register_forward_pre_hook(self._entering(index)))
            after = index + 1 if index + 1 < len(blocks) else OUTSIDE
            handles.append(block.register_forward_hook(self._leaving(index, after)))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                handles.append(parameter.register_post_accumulate_grad_hook(self._finishing(name)))
        try:
            yield
        finally:
            stack.close()
            for handle in handles:
                handle.remove()
            for block in blocks:
                block.__dict__.pop("forward", None)

    def _entering(self, index: int) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            first = next((a for a in args if isinstance(a, torch.Tensor)), None)
            if index == 0 and first is not None and first.requires_grad and first.grad_fn is not None:
                first.register_hook(lambda _: self.move(OUTSIDE, backward=True))
            self.move(index, backward=False)

        return hook

    def _leaving(self, index: int, after: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            first = output if isinstance(output, torch.Tensor) else output[0]
            assert self._live is not None
            # A block's output is kept, if at all, as the next one's input: it goes with that, so that the last
            # block, which no block comes after, holds what every other does.
            self._live.give(first, after)
            if first.requires_grad:
                first.register_hook(lambda _: self.move(index, backward=True))
            self.move(OUTSIDE, backward=False)

        return hook

    def _finishing(self, name: str) -> Any:
        def hook(parameter: torch.Tensor) -> None:
            assert self._live is not None
            live = self._live.live
            self.segments[-1].gradients.append(Gradient(name, live, self._live.reset_peak()))
            parameter.grad = None
            self._live.reset_peak()

        return hook
