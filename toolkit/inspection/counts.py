"""Numbers of a recipe's data: lengths, duplicates, empty texts, and the share of each source."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.inspection.reading import NAMED, Read

_BUCKETS = 12


def lengths_of(lengths: NDArray[np.int64]) -> dict[str, Any]:
    """Least, median, mean, 95th percentile and greatest of ``lengths``, of shape (samples,)."""
    return {
        "min": int(lengths.min()),
        "median": float(np.median(lengths)),
        "mean": float(lengths.mean()),
        "p95": float(np.percentile(lengths, 95)),
        "max": int(lengths.max()),
    }


def histogram(lengths: NDArray[np.int64]) -> list[dict[str, int]]:
    """Ranges of equal width, a round number; what is far longer than the rest is in the last."""
    top = int(np.percentile(lengths, 97))
    step = _round_up(max(1, top // _BUCKETS))
    last = min(int(lengths.max()) // step, top // step + 1)
    counts = np.bincount(np.minimum(lengths // step, last), minlength=last + 1)
    found = [{"from": at * step, "to": (at + 1) * step - 1, "samples": int(count)} for at, count in enumerate(counts)]
    found[-1]["to"] = max(found[-1]["to"], int(lengths.max()))
    first = next(at for at, bucket in enumerate(found) if bucket["samples"])
    return found[first:]


def _round_up(step: int) -> int:
    """The next of 1, 2, 5, 10, 20, 50, ..."""
    size = 1
    while True:
        for factor in (1, 2, 5):
            if factor * size >= step:
                return factor * size
        size *= 10


def repeated(read: Read, name: str) -> dict[str, Any]:
    """Samples that repeat an earlier one in ``ids`` or ``texts``, over all sources; how often a mixture uses a sample
    does not matter."""
    places = read.all("places")
    groups: dict[bytes, list[int]] = {}
    for at, value in enumerate(read.all(name)):
        groups.setdefault(value, []).append(at)
    same = sorted((group for group in groups.values() if len(group) > 1), key=len, reverse=True)
    return {
        "samples": sum(len(group) - 1 for group in same),
        "groups": len(same),
        "largest": [[places[at] for at in group[:NAMED]] for group in same[:NAMED]],
    }


def without_words(read: Read) -> list[dict[str, Any]]:
    """What has no words: its name, how often it occurs, and the first rows."""
    found: dict[str, list[str]] = {}
    for one in read.sources:
        for name, places in one.empty.items():
            found.setdefault(name, []).extend(places)
    return [{"what": name, "count": len(places), "rows": places[:NAMED]} for name, places in sorted(found.items())]


def by_source(read: Read, supervised: NDArray[np.int64]) -> list[dict[str, Any]]:
    """Rows, samples and supervised tokens of each source. ``supervised``: tokens of each sample of an epoch."""
    source, total = read.source_of(), int(supervised.sum())
    found = []
    for number, one in enumerate(read.sources):
        mine = source == number
        count, learned = int(mine.sum()), int(supervised[mine].sum())
        found.append({
            "key": one.key,
            "source": one.spec,
            "rows": one.rows,
            "samples": len(one.places),
            "samples_per_epoch": count,
            "share_of_samples": count / len(source),
            "supervised": learned,
            "share_of_supervised": learned / total if total else 0.0,
        })  # fmt: skip
    return found


def places_of(read: Read, wanted: NDArray[np.bool_]) -> list[str]:
    """The first rows of the samples that ``wanted``, of shape (samples,), marks; each row once."""
    places = read.all("places")
    return [places[at] for at in dict.fromkeys(read.which[wanted].tolist())][:NAMED]
