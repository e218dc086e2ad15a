"""That the inputs of checkpointed blocks were in host memory, and came back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from toolkit.strategies.engines.claims import Claim
from toolkit.verification.record.trace import RankTrace


def engaged(ranks: Sequence[RankTrace], reached: Sequence[bool]) -> Iterator[Claim]:
    """Each block's input went to the host in each forward, and came back for its backward, if it has one. ``reached``:
    of each block of the model, whether a backward reaches it."""
    for rank in ranks:
        expected = rank.forwards * len(rank.recomputed)
        sent, returned, size = (sum(counts) for counts in zip((0, 0, 0), *rank.offloaded, strict=True))
        unreturned = rank.forwards * reached.count(False)
        ok = sent >= expected > 0 and sent - unreturned <= returned <= sent
        if rank.rank == 0 or not ok:
            seen = f"{sent} sent, {returned} returned, {size} bytes"
            yield Claim("offloaded", "activations in host memory", f"{expected} or more, there and back", seen, ok)
