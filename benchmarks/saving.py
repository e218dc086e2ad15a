"""What saving costs: seconds of a checkpoint against those of the steps between two, and the memory it takes.

``python -m benchmarks.saving`` prints a row per strategy, on the demo's model, two processes on a CPU.
"""

from __future__ import annotations

import resource
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from toolkit.launch.group import WorkerGroup
from toolkit.recipe.load import load_recipe
from toolkit.recipe.resolve import Resolved
from toolkit.strategies import resolve

STEPS, SAVES, EVERY = 20, 5, 50


def cell(resolved: Resolved, folder: str) -> dict[str, float]:
    """Median seconds of a step and of a save, and MiB by which saving raised the process's peak."""
    import torch

    from toolkit.data.collate import MicroBatch
    from toolkit.strategies.engines.connect import make_accelerator
    from toolkit.training import checkpoint
    from toolkit.training.loop import Progress, train
    from toolkit.training.session import engage

    session = engage(resolved, make_accelerator(resolved), None, 0)
    rows, length = resolved.micro_size, resolved.recipe.data.max_length
    ids = torch.randint(3, 2000, (rows, length))
    tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    progress = Progress()

    def windows() -> Any:
        while True:
            supervised = rows * (length - 1)
            yield [MicroBatch(tensors, list(range(rows)), supervised, 0, progress.step, 0, 1)]

    times = [time.perf_counter()]
    train(session, windows(), STEPS, progress, lambda pending: times.append(time.perf_counter()))
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    saves = []
    for _ in range(SAVES):
        progress.step += 1
        start = time.perf_counter()
        checkpoint.save(session, Path(folder), progress)
        saves.append(time.perf_counter() - start)
    step = statistics.median(after - before for before, after in pairwise(times[3:]))
    raised = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident) / 1024
    return {"step": step, "save": statistics.median(saves), "raised": raised}


def main(recipe_file: str = "examples/demo/base.yaml") -> None:
    """Print the table."""
    print(
        f"| strategy | s a step | s a save | of a run that saves every {EVERY} steps | MiB more at the peak, rank 0 |"
    )
    print("| --- | --- | --- | --- | --- |")
    with WorkerGroup(2, log=Path(tempfile.mkdtemp()) / "log") as group:
        for strategy in ("ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2"):
            recipe = load_recipe(recipe_file, [f"strategy.name={strategy}"])
            with tempfile.TemporaryDirectory() as folder:
                found = group.run(cell, resolve(recipe, recipe_file), folder)[0]
            share = found["save"] / (EVERY * found["step"] + found["save"])
            times = f"{found['step']:.3f} | {found['save']:.3f} | {100 * share:.1f} %"
            print(f"| {strategy} | {times} | {found['raised']:.0f} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
