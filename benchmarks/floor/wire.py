"""Bytes that a process sends in one step, counted at the collectives of two processes, against the least that the
strategy's sharding allows.

The least gathers what is sharded once per step and sums each gradient once. Only memory is a reason to send more:
weights that are freed after each use are gathered again, gradients that are not kept whole are summed in every
micro-batch.
"""

from __future__ import annotations

from typing import Any

from benchmarks.floor.counting import Counting, during
from benchmarks.floor.loops import Work, llama, toolkit
from benchmarks.floor.table import Row
from toolkit.launch.group import WorkerGroup

STEP = 1
RANKS = 2
GOAL = 1.05
KEPT = {"sync": "last", "reshard_after_forward": False}
CASES: dict[str, dict[str, Any]] = {
    "ddp": {"name": "ddp"},
    "zero1": {"name": "zero1"},
    "zero2": {"name": "zero2"},
    "zero3": {"name": "zero3"},
    "fsdp1": {"name": "fsdp1"},
    "fsdp1, sync last": {"name": "fsdp1", "sync": "last"},
    "fsdp2": {"name": "fsdp2"},
    "fsdp2, sync last": {"name": "fsdp2", "sync": "last"},
    "fsdp2, sync last, weights kept gathered": {"name": "fsdp2", **KEPT},
}
QUICK = ("ddp", "fsdp2", "fsdp2, sync last, weights kept gathered")
BLOCKS = 4
_PARTS = {"half of the blocks unsharded": 0.5, "all blocks unsharded": 1.0}


def cases(lora: bool, blocks: int) -> dict[str, dict[str, Any]]:
    """The recipe's section ``strategy`` by name; beside an adapter also with frozen weights whole."""
    unsharded = {
        f"{name}, {part}": {"name": name, "unsharded_blocks": int(share * blocks)}
        for name in ("zero3", "fsdp1", "fsdp2")
        for part, share in _PARTS.items()
    }
    return CASES | (unsharded if lora else {})


def work_of(case: str, lora: bool) -> Work:
    strategy = cases(lora, BLOCKS)[case]
    return Work(llama(BLOCKS, 128, vocabulary=512), length=16, lora=lora, processes=RANKS, strategy=strategy)


def sent_job(work: Work) -> tuple[float, float, float]:
    """Of one step: bytes that this process sends, those that `plan` counts, and the least."""
    from toolkit.planning.skeleton import build
    from toolkit.recipe.schema import Recipe
    from toolkit.strategies import resolve, strategy_of
    from toolkit.strategies.traffic import Volumes

    resolved = resolve(Recipe.model_validate(work.recipe(STEP + 1)), "floor", device="cpu")
    holdings = build(resolved).holdings
    volumes = Volumes(resolved, holdings.without_frozen(resolved.whole_blocks))
    shards = strategy_of(resolved).traits.shards
    # Gradients are summed once: to their shards, or as an all-reduce, and gathered is what the optimizer or a forward
    # needs whole.
    least = volumes.gradients + (volumes.weights if "weights" in shards else volumes.trained_copies)
    planned = sum(strategy_of(resolved).traffic(resolved, holdings).by_axis(resolved.accumulation).values())
    mode = Counting()
    toolkit(work, STEP + 1, during(STEP, mode))
    return mode.now.sent, planned, least


def measure(quick: bool) -> list[Row]:
    rows = []
    with WorkerGroup(RANKS) as group:
        for lora in (False, True):
            for case in QUICK if quick else cases(lora, BLOCKS):
                sent, planned, least = group.run(sent_job, work_of(case, lora), timeout=900)[0]
                text = f"{sent / 1024:,.0f} KiB; plan counts {planned / 1024:,.0f}, the least is {least / 1024:,.0f}"
                kind = "LoRA" if lora else "every weight"
                rows.append(Row("wire", f"{case}, {kind}", sent / least, text, GOAL))
    return rows
