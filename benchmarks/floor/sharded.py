"""Tokens per second of every strategy against ddp's, two processes with a core each: 86 M weights in fp32, packed rows
of 256 tokens, two micro-batches a step."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.floor.loops import Work, llama
from benchmarks.floor.table import Row, timed
from benchmarks.floor.wire import cases
from toolkit.launch.group import WorkerGroup

GOALS = {("zero2", False): 0.9, ("zero3", False): 0.9, ("fsdp2", False): 0.9,
         ("zero3", True): 0.95, ("fsdp2", True): 0.95, ("fsdp1", True): 0.9}  # fmt: skip
"""By strategy and whether an adapter is trained."""
LIMIT = 600.0


def work_of(case: str, lora: bool, quick: bool) -> Work:
    blocks = 2 if quick else 12
    model = llama(blocks, 64) if quick else llama(blocks, 768, vocabulary=2048)
    strategy = cases(lora, blocks)[case]
    return Work(model, rows=1, length=32 if quick else 256, lora=lora, processes=2, strategy=strategy)


def recipe_of(work: Work, steps: int) -> dict[str, Any]:
    recipe = work.recipe(steps)
    return recipe | {"data": recipe["data"] | {"packing": True}}


def measure(quick: bool) -> list[Row]:
    from toolkit.benchmark.job import Order, turn_job

    warmup, steps, turns = (1, 1, 1) if quick else (1, 2, 3)
    rows = []
    with WorkerGroup(2) as group:
        for lora in (False, True):
            names = ("ddp", "fsdp2") if quick else tuple(cases(lora, 12))
            rates: dict[str, list[float]] = {case: [] for case in names}
            for turn in range(turns):
                for case in names if turn % 2 == 0 else reversed(names):
                    recipe = recipe_of(work_of(case, lora, quick), warmup + steps)
                    order = Order(recipe, "floor", "cpu", steps=steps, warmup=warmup, full=True)
                    found = group.run(turn_job, order, timeout=LIMIT)
                    slowest = sum(max(seconds) for seconds in zip(*(one.seconds for one in found), strict=True))
                    rates[case].append(sum(sum(one.supervised) for one in found) / slowest)
            for case in names:
                ratios = [one / other for one, other in zip(rates[case], rates["ddp"], strict=True)]
                goal = GOALS.get((case.partition(",")[0], lora))
                text = f"{statistics.median(rates[case]):,.0f} tokens/s"
                what = f"{case}, {'LoRA' if lora else 'every weight'}"
                rows.append(timed("sharded", what, ratios, text, goal=goal, least=True))
    return rows
