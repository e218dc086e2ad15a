"""Samples in flat arrays: in memory, or mapped from a file."""

from __future__ import annotations

import itertools
from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.data.formats import Example
from toolkit.tasks import task_of
from toolkit.tasks.labels import IGNORED, Labels


@dataclass
class Columns:
    """Ids and labels of all samples, concatenated, and the end of each; 8 bytes per token. ``media``: references to
    their images or recordings, as bytes one after another; ``media_ends``: the end of each; ``media_counts``: the end
    of each sample's among those."""

    ids: Any
    labels: Any
    id_ends: Any
    label_ends: Any
    cut: Any
    media: Any = b""
    media_ends: Any = (0,)
    media_counts: Any = None
    """None: no sample has any."""
    about: dict[str, Any] = field(default_factory=dict)
    """What reading the rows has found, as JSON: kept with the samples."""

    @classmethod
    def empty(cls) -> Columns:
        """Buffers for ``append``. array, not list: a single buffer that forked workers read without touching reference
        counts."""
        return cls(
            array("i"), array("i"), array("q", [0]), array("q", [0]), array("b"),
            array("B"), array("q", [0]), array("q", [0]),
        )  # fmt: skip

    def append(self, example: Example) -> None:
        self.ids.extend(example.input_ids)
        self.labels.extend([example.labels] if isinstance(example.labels, int) else example.labels)
        self.id_ends.append(len(self.ids))
        self.label_ends.append(len(self.labels))
        self.cut.append(example.cut)
        for one in example.media:
            self.media.frombytes(one)
            self.media_ends.append(len(self.media))
        self.media_counts.append(len(self.media_ends) - 1)

    def __len__(self) -> int:
        return len(self.cut)

    def input_ids(self, index: int) -> list[int]:
        return _between(self.ids, self.id_ends, index)

    def labels_of(self, index: int) -> list[int]:
        return _between(self.labels, self.label_ends, index)

    def media_of(self, index: int) -> tuple[bytes, ...]:
        """References to the sample's images or recordings."""
        if self.media_counts is None:
            return ()
        first, last = (int(self.media_counts[at]) for at in (index, index + 1))
        ends = [int(self.media_ends[at]) for at in range(first, last + 1)]
        return tuple(bytes(self.media[start:end]) for start, end in itertools.pairwise(ends))

    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample, shape (samples,)."""
        return np.diff(np.asarray(self.id_ends))

    def supervised(self, task: str) -> NDArray[np.int64]:
        """Predictions with loss of each sample, as ``formats.supervised_tokens`` counts them."""
        labels, ends = np.asarray(self.labels), np.asarray(self.label_ends)
        before = np.concatenate([[0], np.cumsum(labels != IGNORED)])
        starts = ends[:-1]
        if task_of(task).labels is Labels.NEXT:  # the first position is never predicted
            starts = np.minimum(starts + 1, ends[1:])
        return before[ends[1:]] - before[starts]


def _between(values: Any, ends: Any, index: int) -> list[int]:
    return values[ends[index] : ends[index + 1]].tolist()
