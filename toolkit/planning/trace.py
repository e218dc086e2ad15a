"""Traces one forward and backward of the short model without memory: what each block saves, and its temporary memory.

Nothing is computed or allocated; every operation runs as usual, on tensors with shapes, dtypes and storages but without
memory: meta tensors, or torch's fake tensors if autocast must see a real device. LiveBytes counts the storages;
autograd, checkpointing, autocast, dropout, adapters and attention are the real ones.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from toolkit.errors import InputError, first_line
from toolkit.model.empty import Values, empty_weights, shapes_alone
from toolkit.model.head_loss import multiplied_by
from toolkit.model.loss_terms import CROSS_ENTROPY, LossTerms
from toolkit.planning.autocast import ActedAutocast, NotActedOut, autocast_of_any_device
from toolkit.planning.head import acted_head
from toolkit.planning.parts import acted_parts, counting_sums
from toolkit.planning.segment_tracer import Counter, SegmentTracer
from toolkit.planning.segments import OUTSIDE, Shape, Traced
from toolkit.planning.skeleton import Skeleton
from toolkit.planning.target import TargetKernels
from toolkit.recipe.mesh import RowPart
from toolkit.recipe.resolve import Precision
from toolkit.tasks import task_of
from toolkit.tasks.labels import Labels
from toolkit.training.loss import loss_sum


def trace(skeleton: Skeleton, shape: Shape, precision: Precision, device: str, task: str) -> Traced:
    """Run the short model's forward, loss and backward as on ``device`` («cuda» or «cpu»). Raises InputError if the
    module cannot run on fake tensors."""
    slowly = ""
    try:
        if device == "cuda" and shape.images is None:
            # Meta tensors go through no Python on their way and are two to four times as fast as fake ones.
            try:
                return _traced(skeleton, shape, precision, device, task, meta=True)
            except (NotImplementedError, RuntimeError, NotActedOut) as error:
                if (why := _why_not_on_meta(error)) is None:
                    raise
                slowly = why
        return replace(_traced(skeleton, shape, precision, device, task, meta=False), slowly=slowly)
    except (InputError, MemoryError):
        raise
    except Exception as error:
        first = first_line(error)
        raise InputError(
            f"model: {type(skeleton.model).__name__} cannot be traced without running it ({first[:200]}); "
            "plan cannot count its activations. Measure it in place: toolkit bench RECIPE"
        ) from error


def _why_not_on_meta(error: Exception) -> str | None:
    """What meta tensors cannot do and fake ones can, where that is what an error says: an operation without a meta
    implementation, one that wants a tensor's values, a product that autocast was not acted out for."""
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if isinstance(error, NotActedOut):
        return f"autocast of {first} is not acted out"
    return first[:200] if isinstance(error, NotImplementedError) or "meta" in first.lower() else None


def _traced(skeleton: Skeleton, shape: Shape, precision: Precision, device: str, task: str, *, meta: bool) -> Traced:
    kernels = TargetKernels(device, deepspeed_linear=shape.compute == "deepspeed-linear")
    recorder = SegmentTracer()
    weights = empty_weights(skeleton.model, precision, shape.autocast)
    with shapes_alone(meta), autocast_of_any_device(), weights as model:
        _run(model, skeleton, shape, precision, task, kernels, recorder, meta)
    return Traced(shape, recorder.segments, tuple(sorted(kernels.attention)))


def _run(
    model: nn.Module,
    skeleton: Skeleton,
    shape: Shape,
    precision: Precision,
    task: str,
    kernels: TargetKernels,
    recorder: SegmentTracer,
    meta: bool,
) -> None:
    blocks = [block for _, block in skeleton.blocks]
    mixed = precision.mixed and (shape.autocast or precision.everywhere)
    acted = ActedAutocast() if meta and mixed else None
    with (
        recorder.watching(model, blocks, shape.checkpointing, shape.loop.reentrant),
        contextlib.nullcontext() if shape.images is None else Values(),
        Counter(recorder.owner, acted) as live,
        live.meter,
    ):
        live.born_before([*model.parameters(), *model.buffers()])
        recorder.begin(live)
        tensors = _batch(skeleton.config, shape, task)  # with values, where there are images
        dtype = getattr(torch, precision.compute)
        given = tensors
        if not mixed:  # engines cast features once, beside the batch; autocast leaves them as they are
            given = {name: t.to(dtype) if t is not None and t.is_floating_point() else t for name, t in tensors.items()}
        cast = torch.autocast("cpu", dtype=dtype) if mixed else contextlib.nullcontext()
        acting = acted.acting() if acted else contextlib.nullcontext()
        parts = acted_parts(model, shape.parts, shape.masked, recorder.exchanged)
        sums = counting_sums(recorder.summed)
        evaluated = _evaluated(model) if shape.evaluates else contextlib.nullcontext()
        with kernels.acting(), acting, shape.loop.acting(model), _rows(shape.masked), parts, sums, evaluated:
            factor = torch.full((), 1.0 / shape.length)
            with cast, _head(model, skeleton, shape, kernels), multiplied_by(factor):
                terms = LossTerms.of(skeleton.resolved.recipe) if skeleton.resolved else CROSS_ENTROPY
                loss = _loss(model, skeleton.config, given, task, terms, shape)
            del given
            if shape.evaluates:
                recorder.end()
                return
            recorder.move(OUTSIDE, backward=True)
            weighted = loss * factor
            weighted.backward()
        recorder.end()


def _loss(
    model: nn.Module, config: Any, given: dict[str, torch.Tensor], task: str, terms: LossTerms, shape: Shape
) -> torch.Tensor:
    if shape.parts == 1:
        return shape.loop.loss(model, config, given, task, terms)
    # The first part: of the labels of the others it has one more.
    return loss_sum(model, config, given, task, terms, RowPart(0, shape.parts))


def _batch(config: Any, shape: Shape, task: str) -> dict[str, torch.Tensor]:
    """Full rows: the most that a micro-batch can take. Rows of one sample need no mask, so none is given to the
    model, but its bytes are there."""
    size = (shape.micro, shape.length)
    one_label = task_of(task).labels is Labels.SAMPLE
    media = task_of(task).media
    if media is not None and not media.tokens:
        drawn = media.draw(config.to_dict(), random.Random(0))
        found = {
            name: torch.empty((shape.micro * len(one), *one.shape[1:]), dtype=getattr(torch, one.dtype.name))
            for name, one in drawn.items()
        }
        return found | {"labels": torch.zeros(size[:1] if one_label else size, dtype=torch.int64)}
    size = (shape.micro, -(-shape.length // shape.parts) * shape.parts)
    tensors: dict[str, Any] = {"attention_mask": None}
    if shape.images is None:
        tensors["input_ids"] = torch.zeros(size, dtype=torch.int64)
    else:
        tensors |= shape.images.batch(config, task, *size)
    if shape.masked:
        tensors["position_ids"] = torch.zeros(size, dtype=torch.int64)
    tensors["labels"] = torch.zeros(size[:1] if one_label else size, dtype=torch.int64)
    return tensors


def _head(
    model: nn.Module, skeleton: Skeleton, shape: Shape, kernels: TargetKernels
) -> contextlib.AbstractContextManager[None]:
    if not shape.fused:
        return contextlib.nullcontext()
    assert skeleton.resolved is not None
    return acted_head(model, skeleton.resolved, "cuda" if kernels.cuda else "cpu", shape.micro)


@contextlib.contextmanager
def _evaluated(model: nn.Module) -> Iterator[None]:
    """As `toolkit.training.loop.evaluate` runs a forward."""
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()


@contextlib.contextmanager
def _rows(masked: bool) -> Iterator[None]:
    """transformers 5.23 looks into the position ids for samples that share a row, which nobody can here: it is given
    that there are some, or none."""
    from transformers import masking_utils

    original = masking_utils.find_packed_sequence_indices

    def found(position_ids: torch.Tensor) -> torch.Tensor:
        steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
        return (steps != 1).cumsum(-1)

    masking_utils.find_packed_sequence_indices = found if masked else lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = original
