"""Operators, bytes allocated and bytes copied in one step of the toolkit against the bare loop's; questions to the
device in a forward."""

from __future__ import annotations

from collections import Counter

from benchmarks.floor.counting import Counting, Counts, during
from benchmarks.floor.loops import LOOPS, Work, llama
from benchmarks.floor.table import Row
from benchmarks.host_reads import HostReads

STEP = 2
"""Steps before the one that is counted: they make the optimizer's state and cached masks."""
GOAL = 1.01


def counted(name: str, work: Work) -> Counts:
    """The counts of one step of a loop."""
    mode = Counting()
    LOOPS[name](work, STEP + 1, during(STEP, mode))
    return mode.now


def questions(work: Work) -> Counter[str]:
    """Host reads of one micro-batch of the toolkit, forward and backward, by the package that asks."""
    reads = HostReads()
    LOOPS["toolkit"](work, STEP + 1, during(STEP, reads.watching()))
    found: Counter[str] = Counter()
    for (line, what), times in reads.lines.items():
        package = line.partition("/")[0]
        # A model's own ``to`` takes tensors to the device that they are on, which copies nothing.
        if package == "toolkit" or not what.startswith("to a device"):
            found[package] += times
    return Counter({package: -(-times // work.accumulation) for package, times in found.items()})


def measure(quick: bool) -> list[Row]:
    rows = []
    for lora in (False, True):
        work = Work(llama(4 if quick else 12, 32), rows=2, length=64 if quick else 256, lora=lora)
        kind = "LoRA" if lora else "every weight"
        own, bare = counted("toolkit", work), counted("bare", work)
        for what, mine, least in (
            ("operators", own.operators, bare.operators),
            ("bytes allocated", own.allocated, bare.allocated),
            ("bytes copied", own.copied, bare.copied),
        ):
            rows.append(Row("operators", f"{what}, {kind}", mine / max(1, least), f"{mine:,} to {least:,}", GOAL))
    asked = questions(Work(llama(2, 32), rows=2))
    for package in ("toolkit", "transformers", "other packages"):
        times = asked[package] if package != "other packages" else (
            sum(asked.values()) - asked["toolkit"] - asked["transformers"])  # fmt: skip
        rows.append(Row("questions", f"{package}, single, rows without padding", float(times), f"{times}", 0))
    return rows
