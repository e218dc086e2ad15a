from __future__ import annotations

import pytest

from toolkit.counts import count, trained_share


@pytest.mark.parametrize(
    ("number", "shown"), [(0, "0"), (999, "999"), (1000, "1 k"), (886_700, "886.7 k"), (70_553_700_000, "70.55 B")]
)
def test_a_number_of_parameters(number: int, shown: str) -> None:
    assert count(number) == shown


def test_what_trains_of_a_model() -> None:
    assert trained_share(20_185_088, 8_050_000_000) == "20.19 M of 8.05 B parameters trainable"
    assert trained_share(8_050_000_000, 8_050_000_000) == "all 8.05 B parameters trainable"
