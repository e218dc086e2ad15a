"""One forward and backward of the short model without memory: what each block saves, and what it takes more.

Nothing is computed and nothing allocated; every operation runs as it would, on tensors that have shapes, dtypes and
storages but no memory: meta tensors, or torch's fake ones where autocast must see a real device. LiveBytes counts the
storages; autograd, checkpointing, autocast, dropout, adapters and attention are the real ones.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import flop_registry

from toolkit.errors import InputError
from toolkit.model.checkpointing import checkpoint_blocks
from toolkit.plan.autocast import ActedAutocast, NotActedOut
from toolkit.plan.live import LiveBytes
from toolkit.plan.skeleton import Skeleton
from toolkit.plan.target import TargetKernels
from toolkit.recipe.resolve import Precision
from toolkit.recipe.schema import CheckpointingName, Task
from toolkit.strategies.ledgers.base import Compute
from toolkit.training.loss import loss_sum

OUTSIDE = -1


@dataclass(frozen=True)
class Shape:
    """What a trace depends on. ``compute``: see toolkit/strategies/ledgers/base.py."""

    checkpointing: CheckpointingName
    micro: int
    length: int
    compute: Compute

    @property
    def autocast(self) -> bool:
        return self.compute == "autocast"


@dataclass
class Gradient:
    """The gradient of one weight is complete. ``live``: bytes alive just then, itself included; ``peak``: the
    highest since the one before, or since the segment began."""

    weight: str
    live: int
    peak: int


@dataclass
class Segment:
    """A stretch of the step inside one block, or outside of all (``OUTSIDE``), in the order of time.

    ``start`` and ``peak``: bytes alive at its begin and at its highest. ``held``: bytes alive at its begin that
    each block allocated."""

    block: int
    backward: bool
    start: int
    peak: int = 0
    """From the last finished gradient on, or from the begin where there was none."""
    held: dict[int, int] = field(default_factory=dict)
    flops: int = 0
    gradients: list[Gradient] = field(default_factory=list)


@dataclass
class Traced:
    """The segments of one micro-batch, with what the model of the trace looks like."""

    shape: Shape
    segments: list[Segment]
    attention: tuple[str, ...]


def trace(skeleton: Skeleton, shape: Shape, precision: Precision, device: str, task: Task) -> Traced:
    """Run the short model's forward, loss and backward as ``device`` («cuda» or «cpu») would.

    Raises InputError where the module cannot be run on fake tensors.
    """
    try:
        if device == "cuda":
            # Meta tensors go through no Python on their way and are two to four times as fast as fake ones.
            with contextlib.suppress(NotImplementedError, RuntimeError, AttributeError, TypeError, NotActedOut):
                return _traced(skeleton, shape, precision, device, task, meta=True)
        return _traced(skeleton, shape, precision, device, task, meta=False)
    except (InputError, MemoryError):
        raise
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(
            f"model: {type(skeleton.model).__name__} cannot be traced without running it ({first[:200]}); "
            "plan cannot tell its activations. Measure it in place: toolkit bench RECIPE"
        ) from error


def _traced(skeleton: Skeleton, shape: Shape, precision: Precision, device: str, task: Task, *, meta: bool) -> Traced:
    kernels = TargetKernels(device, zero3=shape.compute == "zero3")
    recorder = _Recorder()
    world: Any = torch.device("meta") if meta else FakeTensorMode(allow_non_fake_inputs=True)
    with warnings.catch_warnings(), world:
        warnings.simplefilter("ignore")
        with _empty_weights(skeleton.model, precision, shape.autocast) as model:
            _run(model, skeleton, shape, precision, task, kernels, recorder, meta)
    return Traced(shape, recorder.segments, tuple(sorted(kernels.attention)))


def _run(
    model: nn.Module,
    skeleton: Skeleton,
    shape: Shape,
    precision: Precision,
    task: Task,
    kernels: TargetKernels,
    recorder: _Recorder,
    meta: bool,
) -> None:
    blocks = [block for _, block in skeleton.blocks]
    mixed = shape.autocast and precision.mixed
    acted = ActedAutocast() if meta and mixed else None
    with recorder.watching(model, blocks, shape.checkpointing), _Counter(recorder.owner, acted) as live:
        live.born_before([*model.parameters(), *model.buffers()])
        recorder.begin(live)
        tensors = _batch(skeleton.config, shape, task)
        dtype = getattr(torch, precision.compute)
        cast = torch.autocast("cpu", dtype=dtype) if mixed else contextlib.nullcontext()
        with kernels.acting(), acted.acting() if acted else contextlib.nullcontext(), _full_rows():
            with cast:
                loss = loss_sum(model, skeleton.config, tensors, task)
            recorder.move(OUTSIDE, backward=True)
            weighted = loss * (1.0 / shape.length)
            weighted.backward()
        recorder.end()


def _batch(config: Any, shape: Shape, task: Task) -> dict[str, torch.Tensor]:
    """Full rows: the most that a micro-batch can take. Full rows need no mask, so none is given to the model, but
    its bytes are there."""
    size = (shape.micro, shape.length)
    tensors: dict[str, Any] = {"input_ids": torch.zeros(size, dtype=torch.int64), "attention_mask": None}
    if task == "sequence-classification":
        tensors["labels"] = torch.zeros(size[:1], dtype=torch.int64)
    else:
        tensors["labels"] = torch.zeros(size, dtype=torch.int64)
    return tensors


@contextlib.contextmanager
def _full_rows() -> Iterator[None]:
    """transformers 5.23 looks into the position ids for rows packed together and, where it may not look (fake
    tensors), makes a mask for them. Rows are full here and need none, as in a real run of such rows."""
    from transformers import masking_utils

    original = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = original


@contextlib.contextmanager
def _empty_weights(model: nn.Module, precision: Precision, autocast: bool) -> Iterator[nn.Module]:
    """The model with weights of the dtypes that a strategy computes with, made where tensors are made now."""
    kept: list[tuple[nn.Module, str, Any, bool]] = []
    made: dict[int, nn.Parameter] = {}
    compute, trained, frozen = (getattr(torch, d) for d in (precision.compute, precision.trainable, precision.frozen))
    try:
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is None:
                    continue
                kept.append((module, name, parameter, True))
                if id(parameter) not in made:
                    dtype = parameter.dtype
                    if dtype.is_floating_point:
                        dtype = frozen if not parameter.requires_grad else trained if autocast else compute
                    data = torch.empty(parameter.shape, dtype=dtype)
                    made[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    kept.append((module, name, buffer, False))
                    module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
        yield model
    finally:
        for module, name, tensor, is_parameter in kept:
            (module._parameters if is_parameter else module._buffers)[name] = tensor


class _Counter(LiveBytes):
    """Live bytes and, beside them, floating point operations by torch's own formulas: two for a multiply-add of
    matrix products, convolutions and attention, nothing for the rest (torch.utils.flop_counter)."""

    flops = 0

    def __init__(self, owner: Callable[[], Any], acted: ActedAutocast | None) -> None:
        super().__init__(owner, meta=True)
        self._acted = acted

    def dispatched(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if self._acted is not None:
            self._acted.check(func, args)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=result)


class _Recorder:
    """Notes where the step stands (which block, forward or backward) and the bytes alive there."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self._counted = 0
        self._live: _Counter | None = None

    def owner(self) -> int:
        return self.segments[-1].block if self.segments else OUTSIDE

    def begin(self, live: _Counter) -> None:
        self._live = live
        self._open(OUTSIDE, False)

    def move(self, block: int, backward: bool) -> None:
        """The step goes on in ``block``."""
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

    @contextlib.contextmanager
    def watching(self, model: nn.Module, blocks: list[nn.Module], kind: CheckpointingName) -> Iterator[None]:
        """Checkpointing on the blocks, a note at every entry and exit, and gradients taken away once they are
        complete: how long they stay is the strategy's business."""
        handles: list[Any] = []
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
