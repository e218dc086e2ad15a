"""Jobs one after another in a process: none of them sees what ran before it."""

from __future__ import annotations

from typing import Any

import pytest

from rehearsal.cells import STRATEGIES, Call

_GROUP = tuple(name for name in STRATEGIES if name != "single")
_RANK = 7
"""Of every job in ``pairs``."""
_SLOW = {"every strategy after every other", "another precision"}
"""Minutes on an idle core."""
_JOBS = {
    "every strategy after every other": ("of_strategies", _GROUP),
    "another precision": ("of_precisions", ("zero2", "fsdp1", "fsdp2"), ("fp32", "bf16", "fp16")),
    # It sums the norm of gradients on the host, in whatever group is there.
    "offload in the group of others": ("then_offload", ("ddp", "zero2")),
}


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(
            Call(f"pairs.{name}", tuple(args), long=True, local_rank=_RANK),
            id=id,
            marks=[pytest.mark.nightly] if id in _SLOW else [],
        )
        for id, (name, *args) in _JOBS.items()
    ],
)
def test_a_job_is_what_it_is_alone(stage: Any, call: Call) -> None:
    assert stage(call) == []
