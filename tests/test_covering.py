"""Few rows that hold every combination of some options."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from covering import covering

OPTIONS = {"strategy": "abcdefg", "precision": "xyz", "tied": (False, True), "window": (1, 3)}


@pytest.mark.parametrize("strength", [1, 2, 3, 4])
def test_every_combination_is_in_a_row(strength: int) -> None:
    rows = covering(OPTIONS, strength)
    for places in combinations(range(len(OPTIONS)), strength):
        expected = set(product(*(list(OPTIONS.values())[place] for place in places)))
        assert {tuple(row[place] for place in places) for row in rows} == expected
    assert len(set(rows)) == len(rows)
    assert rows == covering(OPTIONS, strength), "the same tests every time"


def test_they_are_not_many_more_than_the_two_longest_options_need() -> None:
    """Of 84 rows in full, 21 hold every two values: 7 x 3 is the least."""
    assert len(covering(OPTIONS, 4)) == 84
    assert len(covering(OPTIONS, 2)) == 21
