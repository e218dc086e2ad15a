"""Seconds per step of every strategy, predicted for the machine that was calibrated, and measured on it."""

from __future__ import annotations

import itertools
import os

import pytest

from plan.times import WAYS, Way, rounds
from toolkit.launch.group import WorkerGroup

TOLERANCE = 0.20
"""What the plan claims for a calibrated machine."""
APART = 0.10
"""Measured steps nearer than this change places from one turn to the next on two shared cores."""


@pytest.mark.nightly
@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.label.replace(" ", "-"))
def test_calibrated_seconds_are_within_a_fifth_and_in_order(way: Way) -> None:
    if os.getloadavg()[0] > 2.5:
        pytest.skip("other work on this machine: neither calibration nor measurement means anything")
    with WorkerGroup(2) as group:
        found = rounds(group, 2, way)
    for name, (said, real) in found.items():
        assert said == pytest.approx(real, rel=TOLERANCE), name
    for (one, (said, real)), (other, (said_other, real_other)) in itertools.combinations(found.items(), 2):
        if abs(real - real_other) > APART * max(real, real_other):
            assert (said < said_other) == (real < real_other), (one, other)
