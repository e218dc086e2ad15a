"""Rows of options that together hold every combination of any few of them: what a crossing in full would find of a
defect that so few options make, in a fraction of its tests.

Most defects need one option or two, and almost none more than four (Kuhn, Wallace and Gallo, "Software Fault
Interactions and Implications for Software Testing", IEEE TSE 30(6), 2004)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def covering(options: dict[str, Sequence[Any]], strength: int) -> list[tuple[Any, ...]]:
    """Rows, in the order of ``options``, in which each combination of values of any ``strength`` options occurs.

    Greedy: the row that has most of what is missing, the first of equals; so the same rows every time. It looks at
    every row that there is, which is for thousands of them, not for millions.
    """
    choices = [range(len(values)) for values in options.values()]
    every = list(product(*choices))
    places = list(combinations(range(len(choices)), strength))

    def held(row: tuple[int, ...]) -> set[tuple[Any, ...]]:
        return {(at, *(row[place] for place in at)) for at in places}

    of = {row: held(row) for row in every}
    missing = set().union(*of.values())
    rows = []
    while missing:
        best = max(every, key=lambda row: len(of[row] & missing))
        missing -= of[best]
        rows.append(best)
    values = [list(some) for some in options.values()]
    return [tuple(values[at][index] for at, index in enumerate(row)) for row in sorted(rows)]
