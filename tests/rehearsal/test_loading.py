"""Loading a model with the widths of Llama 3 70B: what each rank holds and reads, beside what `plan` says."""

from __future__ import annotations

from typing import Any

import pytest

from rehearsal.cells import Call
from rehearsal.large import LLAMA_70B, cell

SHARDING = ("zero3", "fsdp1", "fsdp2")
_TRAINED: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"adapter": {"r": 16, "target_modules": "all-linear"}},
    "offload": {"strategy": {"offload": "all"}},
}


def _call(strategy: str, world: int, rank: int, layers: int, trained: str) -> Call:
    return Call("loading_job.loaded", (cell(strategy, world, rank, layers, LLAMA_70B, _TRAINED[trained]),))


def _cases() -> list[Any]:
    found = []
    for strategy in SHARDING:
        for trained in _TRAINED:
            for layers, world, rank in ((2, 64, 3), (80, 64, 0), (80, 512, 259), (80, 1024, 1023)):
                quick = layers == 2 and trained == ("offload" if strategy == "fsdp1" else "full")
                if layers > 2 and trained == "offload":
                    continue
                call = _call(strategy, world, rank, layers, trained)
                marks = pytest.mark.nightly if quick else pytest.mark.weekly
                name = f"{strategy}-{trained}-{layers}-layers-{rank}of{world}"
                found.append(pytest.param(world, call, id=name, marks=marks))
    return found


@pytest.mark.timeout(900)  # a process makes what all tests ask of it in turn, as long as conftest's limit
@pytest.mark.parametrize(("world", "call"), _cases())
def test_what_a_rank_holds_is_what_is_planned(stage: Any, world: int, call: Call) -> None:
    found = stage(call)
    assert found.error is None, found.error
    assert found.whole is None
    device, host = found.planned
    # DeepSpeed pads to equal parts, and norms, which the plan counts as they are from the first step on, whole, are
    # parts still: 0.12 %. FSDP2 deals out whole rows, of which an adapter's matrices have fewer than there are ranks.
    assert found.device == pytest.approx(device, rel=2e-3, abs=found.rows)
    assert found.read == pytest.approx(found.stored / world, rel=0.05)  # the last rank's parts are smaller
    # Whether an adapter, drawn whole on the host, is there still while weights are read is the engine's.
    assert found.host <= 1.005 * host
    if call.args[0].rank < world - 1:
        assert found.host >= 0.995 * (host - found.adapter)
