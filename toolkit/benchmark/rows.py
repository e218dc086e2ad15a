"""The rows of a step: how much of them is padding, and how many tokens they attend to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from toolkit.data.collate import MicroBatch, bounds_of, divided, drawn_features, sample_spans
from toolkit.data.media import kinds_of_config
from toolkit.data.spread import takes_one_row
from toolkit.recipe.limits import limits_of
from toolkit.recipe.resolve import Resolved
from toolkit.tasks import task_of
from toolkit.tasks.base import Task
from toolkit.tasks.labels import IGNORED, Labels


@dataclass(frozen=True)
class Rows:
    """``tokens``: of samples; ``slots``: with the padding; ``pairs``: of a token and one that it may attend to."""

    tokens: int = 0
    slots: int = 0
    pairs: int = 0

    @classmethod
    def of(cls, window: Sequence[MicroBatch]) -> Rows:
        """Count one window of one rank."""
        tokens = slots = pairs = 0
        for micro in window:
            labels = micro.tensors["labels"]
            # A model of images or sound alone: what counts is its samples, or the target's tokens.
            slots += micro.tensors.get("input_ids", labels).numel()
            if "input_ids" not in micro.tensors:
                lengths = (labels != IGNORED).reshape(len(labels), -1).sum(-1).tolist()
            elif "attention_mask" in micro.tensors:
                lengths = micro.tensors["attention_mask"].sum(-1).tolist()
            else:
                spans = sample_spans(micro.tensors["position_ids"])
                # A padding token is alone in its span; so is a sample of one token, which teaches as little.
                lengths = [end - start for row in spans for start, end in row if end - start > 1]
            tokens += sum(lengths)
            pairs += sum(length * (length + 1) // 2 for length in lengths)
        return cls(tokens, slots, pairs)

    def __add__(self, other: Rows) -> Rows:
        return Rows(self.tokens + other.tokens, self.slots + other.slots, self.pairs + other.pairs)


def full_rows(resolved: Resolved, config: Any, rank: int) -> Iterator[list[MicroBatch]]:
    """Windows without end whose rows all have ``max_length`` random tokens: the most that a micro-batch can take."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    recipe = resolved.recipe
    shape = (resolved.micro_size, recipe.data.max_length)
    draw = torch.Generator().manual_seed(resolved.data_rank(rank))
    step = 0
    while True:
        window = []
        for micro in range(resolved.accumulation):
            task = task_of(recipe.model.task)
            if task.media is not None and not task.media.tokens:
                window.append(_of_media(resolved, config, task, rank, step, micro))
                continue
            ids = torch.randint(3, text.vocab_size, shape, generator=draw)
            features: dict[str, torch.Tensor] = {}
            if task.media is not None and task.media.in_text is not None:
                features = drawn_features(task, config.to_dict(), shape[0], rank)
                image = torch.tensor(task.media.in_text(config.to_dict(), 1))
                ids[:, : len(image)] = image
                token = image.mode().values
                features |= {name: (ids == token).long() for name in kinds_of_config(task, config)}
            tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()} | features
            if task.classes or task.numbers:
                tensors["labels"] = torch.zeros(shape[:1] if task.labels is Labels.SAMPLE else shape, dtype=torch.int64)
            labels = tensors["labels"]
            supervised = (labels[:, 1:] if task.labels is Labels.NEXT else labels).numel()
            if recipe.data.packing:
                tensors, supervised = _packed(ids, takes_one_row(recipe.model.attention))
            whole = MicroBatch(tensors, list(range(shape[0])), supervised, 0, step, micro, resolved.accumulation,
                               bounds=bounds_of(tensors), row_tokens=ids.numel())  # fmt: skip
            window.append(divided(whole, resolved.row_part(rank)))
        yield window
        step += 1


def _of_media(resolved: Resolved, config: Any, task: Task, rank: int, step: int, micro: int) -> MicroBatch:
    rows = resolved.micro_size
    tensors = drawn_features(task, config.to_dict(), rows, rank)
    shape = (rows,) if task.labels is Labels.SAMPLE else (rows, longest_target(resolved))
    tensors["labels"] = torch.zeros(shape, dtype=torch.int64)
    supervised = tensors["labels"].numel()
    return MicroBatch(
        tensors, list(range(rows)), supervised, 0, step, micro, resolved.accumulation, row_tokens=supervised
    )


def longest_target(resolved: Resolved) -> int:
    """Tokens that a decoder writes at most: as many as it has positions, and ``data.max_length`` allows."""
    limit, most = limits_of(resolved.recipe, resolved.facts).targets, resolved.recipe.data.max_length
    return most if limit is None else min(most, limit.tokens)


def _packed(ids: torch.Tensor, one_row: bool) -> tuple[dict[str, torch.Tensor], int]:
    """Each row as two samples of different lengths: the least that packing has to keep apart."""
    first = -(-ids.shape[1] * 2 // 3)
    positions = torch.cat([torch.arange(first), torch.arange(ids.shape[1] - first)]).expand_as(ids)
    labels = ids.masked_fill(positions == 0, IGNORED)
    tensors = {"input_ids": ids, "position_ids": positions.contiguous(), "labels": labels}
    if one_row:
        tensors = {name: tensor.reshape(1, -1) for name, tensor in tensors.items()}
    return tensors, int((tensors["labels"][:, 1:] != IGNORED).sum())
