"""Samples to verify with: token ids of the model's own vocabulary, ragged on purpose, the same on every rank."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.data.collate import MicroBatch, Slot, collate, divided, packed_slot
from toolkit.data.formats import Example
from toolkit.data.masking import Masking
from toolkit.data.media import with_defaults
from toolkit.data.order import deal, epoch_order, window_count, windows
from toolkit.data.packing import by_length, packed_rows
from toolkit.data.samples import blank_of, unlabelled
from toolkit.data.spread import takes_one_row
from toolkit.model.new_tokens import ROWS, new_tokens
from toolkit.recipe.limits import limits_of
from toolkit.recipe.mesh import RowPart
from toolkit.recipe.pooling import pooled_token
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.reference.loop import Window
from toolkit.tasks import task_of
from toolkit.tasks.base import Drawn
from toolkit.verification.cases.images import SampleImages

_LONGEST = 24
_SHORTEST = 4
_ATTEMPTS = 8


class RaggedSamples:
    """In place of a run's tokenised data (``toolkit.data.samples.MapSamples``)."""

    streamed = False
    label_names = None
    notes: Sequence[str] = ()

    def __init__(
        self,
        examples: list[Example],
        task: str,
        pad_id: int,
        masking: Masking | None = None,
        pooled: int | None = None,
    ) -> None:
        self.examples, self.task, self.pad_id, self.masking, self.pooled = examples, task, pad_id, masking, pooled

    @property
    def blank(self) -> Example | None:
        """As of ``MapSamples``."""
        media = task_of(self.task).media
        if media is None:
            return blank_of(self.task, self.pad_id, self.pooled, self.examples[0])
        return unlabelled(next(one for one in self.examples if media.main in one.features))

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        return self.examples[index]

    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample."""
        return np.array([len(example.input_ids) for example in self.examples], dtype=np.int64)


def ragged_samples(resolved: Resolved, config: dict[str, Any], full_windows: int) -> RaggedSamples:
    """An epoch of ``full_windows`` windows and a short one, in whose last micro-batch all ranks but one are empty.

    Every sample is unique: its tokens alone identify it. Drawn again where no window has another number of
    supervised tokens on each rank, as may happen with a row for each two that divide it.
    """
    for attempt in range(_ATTEMPTS):
        samples = _drawn(resolved, config, full_windows, attempt)
        if resolved.token_parts == 1 or uneven(expected_windows(samples, resolved, full_windows + 1), resolved):
            break
    return samples


def uneven(windows: Sequence[Window], resolved: Resolved) -> int:
    """How many windows have other numbers of supervised tokens on some ranks than on others."""
    ranks = range(resolved.token_parts)
    return sum(len({sum(m.supervised for r, m in window if r == rank) for rank in ranks}) > 1 for window in windows)


def _drawn(resolved: Resolved, config: dict[str, Any], full_windows: int, attempt: int) -> RaggedSamples:
    recipe = resolved.recipe
    draw = random.Random(recipe.run.seed + attempt * 2**32)
    pad = config.get("pad_token_id")
    pad_id = pad if isinstance(pad, int) else 0
    task = task_of(recipe.model.task)
    whole = config if task.media is None else with_defaults(config)
    images = SampleImages(task, config) if task.media is not None and task.media.tokens else None
    pooled = pooled_token(recipe, resolved.facts)
    taken = {pad_id, pooled} if images is None else {pad_id, *images.reserved}
    ids = [i for i in range(3, min(config.get("vocab_size", 0), 4096)) if i not in taken]
    limits = limits_of(recipe, resolved.facts)
    positions = [limit.tokens for limit in (limits.rows, limits.targets) if limit is not None]
    longest = max(_SHORTEST, min(_LONGEST, recipe.data.max_length, *positions))
    row = resolved.micro_size * resolved.data_size
    # All but one of a window's micro-batches, the last of them with a single sample.
    short = min((resolved.accumulation - 2) * row + 1 if resolved.accumulation > 1 else 1, resolved.global_size - 1)
    drawn = Drawn(draw, ids, longest, recipe.model.num_labels or 2, recipe.data.format)
    learned = _learned_tokens(resolved)
    examples: dict[tuple[int, ...], Example] = {}
    wanted = full_windows * resolved.global_size + short
    while (rows := _row_count(examples, recipe)) != wanted:
        if rows > wanted:  # a sample more can take two rows more; another draw does not
            examples.clear()
        if task.media is not None and not task.media.tokens:
            labels = task.draw(drawn, [])
            examples[(len(examples),)] = Example([], labels, features=task.media.draw(whole, draw))
            continue
        tokens = draw.choices(ids, k=draw.randint(_SHORTEST, longest))
        if learned:  # the only rows of the embedding that train: each sample has one of them
            tokens[draw.randrange(len(tokens))] = draw.choice(learned)
        if pooled is not None:
            tokens[-1 if tokens[-1] not in learned else 0] = pooled
        example = Example(tokens, task.draw(drawn, tokens))
        examples[tuple(tokens)] = example if images is None else images.among(example, draw, first=not examples)
    masking = Masking(recipe.data.mask_probability, ids[-1], ids[-1], recipe.run.seed) if task.masks else None
    return RaggedSamples(list(examples.values()), task.name, pad_id, masking, pooled)


def _learned_tokens(resolved: Resolved) -> list[int]:
    """Ids of new tokens, and those whose embeddings an adapter trains, in order."""
    options = resolved.recipe.adapter.options if resolved.recipe.adapter else {}
    found: Any = next((options[key] for key in ROWS if options.get(key)), [])
    own = {index for part in found.values() for index in part} if isinstance(found, dict) else set(found)
    new = new_tokens(resolved)
    return sorted(own.union(() if new is None else new.ids))


def _row_count(examples: dict[tuple[int, ...], Example], recipe: Recipe) -> int:
    if not recipe.data.packing:
        return len(examples)
    return len(packed_rows([len(tokens) for tokens in examples], recipe.data.max_length, recipe.run.seed,
                           recipe.data.shuffle))  # fmt: skip


def expected_windows(samples: RaggedSamples, resolved: Resolved, steps: int) -> list[Window]:
    """What each step has to consume, from the seed alone: (rank, micro-batch) pairs by step, one rank for each of
    ``resolved.token_parts``."""
    recipe = resolved.recipe
    data = recipe.data
    found: list[Window] = []
    rows = [[number] for number in range(len(samples))]
    if data.packing:
        rows = packed_rows(samples.lengths(), data.max_length, recipe.run.seed, data.shuffle)
    per_epoch = window_count(len(rows), resolved.global_size)
    for step in range(steps):
        epoch, window = divmod(step, per_epoch)
        order = epoch_order(len(rows), recipe.run.seed, epoch, data.shuffle)
        ids = list(windows(order, resolved.global_size))[window]
        if data.group_by_length:
            ids = by_length(ids, samples.lengths())
        dealt = deal(ids, resolved.micro_size, resolved.data_size)
        pairs: list[tuple[int, MicroBatch]] = []
        for micro, ranks in enumerate(dealt):
            for rank, mine in enumerate(ranks):
                slot = _slot([rows[i] for i in mine], recipe, epoch, step, micro, len(dealt))
                pairs += _parts(_micro(samples, slot, resolved.mesh.context), rank, resolved.mesh.context)
        found.append(pairs)
    return found


def _parts(whole: MicroBatch, rank: int, count: int) -> list[tuple[int, MicroBatch]]:
    """The micro-batch of a data-parallel rank, by the ranks that divide its rows."""
    if count == 1:
        return [(rank, whole)]
    return [(rank * count + index, divided(whole, RowPart(index, count))) for index in range(count)]


def _slot(rows: list[list[int]], recipe: Recipe, epoch: int, step: int, micro: int, count: int) -> Slot:
    if recipe.data.packing:
        return packed_slot(rows, epoch, step, micro, count, takes_one_row(recipe.model.attention))
    return Slot([number for row in rows for number in row], epoch, step, micro, count)


def _micro(samples: RaggedSamples, slot: Slot, multiple: int) -> MicroBatch:
    examples = [samples[i] for i in slot.sample_ids]
    return collate(examples, slot, samples.task, samples.pad_id, multiple, samples.masking, samples.blank)
