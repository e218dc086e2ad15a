"""What FSDP keeps between two steps: no gradients, and of an evaluation in between no order of its forwards."""

from __future__ import annotations

from itertools import chain, islice
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from jobs import loader_for, resolved_from
from tiny import recipe_dict
from toolkit.launch.group import WorkerGroup
from toolkit.recipe.resolve import Resolved
from toolkit.training.loop import Progress, evaluate, train
from toolkit.training.session import open_session


def resolved(root: Path, strategy: str, **sections: Any) -> Resolved:
    return resolved_from(recipe_dict(root, strategy={"name": strategy}, machine={"processes": 2}, **sections))


def gradient_job(resolved: Resolved, skips: bool) -> list[int]:
    """Bytes of each unit's flat gradient after a step, or after one that was skipped."""
    session = open_session(resolved)
    engine = session.engine
    if skips:
        engine.step = lambda lr: engine.skip()  # type: ignore[method-assign]
    train(session, loader_for(resolved, session.accelerator.process_index), 1, Progress(), lambda pending: None)
    flats = [unit._handle.flat_param for unit in FullyShardedDataParallel.fsdp_modules(engine.model) if unit._handle]
    assert len(flats) > 2
    return [0 if flat.grad is None else flat.grad.nbytes for flat in flats]


@pytest.mark.parametrize("skips", [False, True], ids=["step", "skipped"])
def test_no_gradient_of_fsdp1_is_left(skips: bool, tiny_root: Path, group: WorkerGroup) -> None:
    for sizes in group.run(gradient_job, resolved(tiny_root, "fsdp1"), skips, timeout=200):
        assert set(sizes) == {0}


def unused_job(resolved: Resolved) -> list[str]:
    """Units that the backward after an evaluation gathers and does not use."""
    session = open_session(resolved)
    rank = session.accelerator.process_index
    loader = loader_for(resolved, rank)
    train(session, loader, 1, Progress(), lambda pending: None)
    evaluate(session, chain.from_iterable(islice(loader_for(resolved, rank), 2)))
    unused: list[str] = []
    right = FSDPParamGroup.finalize_backward

    def finalize(group: FSDPParamGroup) -> None:
        if group._all_gather_result is not None:
            unused.append(str(group._module_fqn))
        right(group)

    with mock.patch.object(FSDPParamGroup, "finalize_backward", finalize):
        train(session, loader, 2, Progress(), lambda pending: None)
    return unused


@pytest.mark.parametrize("adapter", [pytest.param(None, marks=pytest.mark.nightly), {"r": 4}], ids=["full", "lora"])
def test_fsdp2_gathers_nothing_that_only_an_evaluation_needed(
    adapter: dict[str, Any] | None, tiny_root: Path, group: WorkerGroup
) -> None:
    recipe = resolved(tiny_root, "fsdp2", adapter=adapter)
    assert group.run(unused_job, recipe, timeout=200) == [[], []]
