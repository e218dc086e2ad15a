"""What padding costs: the micro-batches of one epoch in the loader's own order, as shapes only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from toolkit.data.collate import Slot, packed_slot, padded_shape
from toolkit.data.loader import MapSlots
from toolkit.data.order import deal
from toolkit.data.spread import Spread, takes_one_row
from toolkit.data.stream import packed_windows, stream_windows
from toolkit.recipe.packable import why_not_packable
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.tasks import task_of
from toolkit.tasks.labels import Labels

PLAIN, GROUPED, PACKED = "no packing", "group_by_length", "packing"


@dataclass(frozen=True)
class Arrangement:
    """One epoch, the first, under one way to fill micro-batches; all ranks together.

    ``reason``: why the recipe cannot use it; its numbers are then 0.
    """

    name: str
    recipe: bool
    """Whether it is the recipe's own."""
    rows: int = 0
    steps: int = 0
    computed_tokens: int = 0
    padding_tokens: int = 0
    largest_micro_batch: int = 0
    """Tokens that one rank computes at once, padding included."""
    reason: str | None = None

    @property
    def padding_share(self) -> float:
        """Padding, as a fraction of the computed tokens."""
        return self.padding_tokens / self.computed_tokens if self.computed_tokens else 0.0


def arrangements(
    resolved: Resolved, lengths: NDArray[np.int64], targets: NDArray[np.int64], evaluation: bool
) -> list[Arrangement]:
    """The epoch without packing, with group_by_length and with packing; of an evaluation, which does neither, only as
    it is.

    ``lengths``, ``targets``: tokens of each sample's input and, for sequence-to-sequence, target; shape (samples,).
    """
    data = resolved.recipe.data
    own = PACKED if data.packing else GROUPED if data.group_by_length else PLAIN
    if evaluation:
        return [_arranged(PLAIN, True, resolved, lengths, targets, evaluation)]
    found = []
    for name in (PLAIN, GROUPED, PACKED):
        reason = _why_not(name, resolved)
        if reason is None:
            found.append(_arranged(name, name == own, resolved, lengths, targets, evaluation))
        else:
            found.append(Arrangement(name, name == own, reason=reason))
    return found


def _why_not(name: str, resolved: Resolved) -> str | None:
    recipe = resolved.recipe
    if name == GROUPED and recipe.data.streaming:
        return "the lengths of streamed samples are not known in advance"
    if name == PACKED and not task_of(recipe.model.task).packs:
        return f"requires model.task: causal-lm (it is {recipe.model.task})"
    if name == PACKED:
        return why_not_packable(resolved.facts, recipe.model.attention or "sdpa")
    return None


def _arranged(
    name: str,
    own: bool,
    resolved: Resolved,
    lengths: NDArray[np.int64],
    targets: NDArray[np.int64],
    evaluation: bool,
) -> Arrangement:
    data = resolved.recipe.data.model_copy(
        update={"packing": name == PACKED, "group_by_length": name == GROUPED}
        | ({"streaming": False} if evaluation else {})
    )
    recipe = resolved.recipe.model_copy(update={"data": data})
    spread = Spread(
        resolved.micro_size,
        1 if evaluation else resolved.accumulation,
        resolved.data_size,
        0,
        recipe.run.seed,
        data.shuffle and not evaluation,
        one_row=takes_one_row(recipe.model.attention),
    )
    rows = steps = computed = largest = 0
    inputs, outputs = lengths.tolist(), targets.tolist()
    with_targets = task_of(recipe.model.task).labels is Labels.TARGET
    for window in _windows(lengths, recipe, spread):
        steps += 1
        for slot in window:
            held, width = padded_shape([inputs[number] for number in slot.sample_ids], slot.rows)
            tokens = held * width
            if with_targets:
                held, width = padded_shape([outputs[number] for number in slot.sample_ids], slot.rows)
                tokens += held * width
            rows += held if slot.sample_ids else 0
            computed += tokens
            largest = max(largest, tokens)
    real = int(lengths.sum() + targets.sum())
    return Arrangement(name, own, rows, steps, computed, computed - real, largest)


def _windows(lengths: NDArray[np.int64], recipe: Recipe, spread: Spread) -> Iterator[list[Slot]]:
    """The windows of the first epoch, each with the slots of all ranks."""
    if not recipe.data.streaming:
        slots = MapSlots(lengths, recipe, spread)
        for dealt in slots.windows(0):
            yield [slots.slot(mine, 0, 0, micro, len(dealt)) for micro, ranks in enumerate(dealt) for mine in ranks]
        return
    if not recipe.data.packing:
        for held in stream_windows(range(len(lengths)), spread, 0):
            dealt = deal(held, spread.micro_size, spread.data_size)
            yield [Slot(mine, 0, 0, 0, 1) for ranks in dealt for mine in ranks]
        return
    packed = packed_windows(
        range(len(lengths)), int, lambda number: int(lengths[number]), recipe.data.max_length, spread, 0
    )
    for rows in packed:
        parts = deal(rows, spread.micro_size, spread.data_size)
        yield [packed_slot(mine, 0, 0, 0, 1, spread.one_row) for ranks in parts for mine in ranks]


def first_rows(resolved: Resolved, lengths: NDArray[np.int64], count: int) -> list[list[int]]:
    """The samples of the first ``count`` packed rows of the first epoch."""
    recipe = resolved.recipe
    one_row = takes_one_row(recipe.model.attention)
    spread = Spread(1, 1, 1, 0, recipe.run.seed, recipe.data.shuffle, one_row=one_row)
    found: list[list[int]] = []
    for window in _windows(lengths, recipe, spread):
        if len(found) == count:
            break
        found += [slot.sample_ids for slot in window]
    return found
