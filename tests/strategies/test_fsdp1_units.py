"""FSDP1's units: of a block one of what is frozen and one of what trains, whatever the number of its layers."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils._pytree import tree_iter

from toolkit.launch.group import WorkerGroup


def gathers_job(strategy: dict[str, Any], lora: bool) -> list[int]:
    """Elements that each gather of the second step filled."""
    from benchmarks.floor.counting import during
    from benchmarks.floor.loops import Work, llama, toolkit
    from toolkit.verification.record.tracer import _Dispatched

    sizes: list[int] = []

    def called(name: str, arguments: Any) -> None:
        if name.startswith("c10d::allgather_"):  # what comes of each rank, a tensor for each
            sizes.append(sum(part.numel() for part in tree_iter(arguments[0])))

    work = Work(llama(3, 64), length=16, processes=2, lora=lora, strategy=strategy)
    toolkit(work, 2, during(1, _Dispatched(called)))
    return sizes


@pytest.mark.parametrize("lora", [False, True])
def test_a_block_is_gathered_at_once_for_each_pass(lora: bool, group: WorkerGroup) -> None:
    sizes = group.run(gathers_job, {"name": "fsdp1"}, lora, timeout=120)[0]
    micro_batches, blocks, root = 2, 3, 1
    units = 2 * blocks if lora else blocks
    assert len(sizes) == micro_batches * (2 * units + root), sizes
    assert len(set(sizes)) == (3 if lora else 2), sizes


def test_whole_blocks_leave_the_adapter_alone_to_be_gathered(group: WorkerGroup) -> None:
    sizes = group.run(gathers_job, {"name": "fsdp1", "unsharded_blocks": 3}, True, timeout=120)[0]
    assert len(sizes) == 2 * (2 * 3 + 1), sizes
