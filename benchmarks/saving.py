"""What saving costs: seconds of a checkpoint against those of the steps between two, and the memory it takes.

``python -m benchmarks.saving`` prints a row per strategy, on the demo's model, two processes on a CPU;
``python -m benchmarks.saving RECIPE k=v ...`` on another. Training waits until rank 0 has all tensors; what is written
after that is beside it (``run.async_save``).
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

STEPS, SAVES, EVERY = 10, 3, 50


def cell(resolved: Resolved, folder: str) -> dict[str, float]:
    """Median seconds of a step, of what training waits for a save and of the whole of it; MiB by which saving raised
    the process's peak, and those that are saved."""
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
    waits, saves = [], []
    for _ in range(SAVES):
        progress.step += 1
        start = time.perf_counter()
        saving = checkpoint.begin(session, Path(folder), progress)
        waits.append(time.perf_counter() - start)
        last = saving.settle(session)
        saves.append(time.perf_counter() - start)
    size = sum(file.stat().st_size for file in last.iterdir()) / 1024**2
    step = statistics.median(after - before for before, after in pairwise(times[3:]))
    raised = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident) / 1024
    return {"step": step, "wait": statistics.median(waits), "save": statistics.median(saves), "raised": raised,
            "size": size}  # fmt: skip


def main(recipe_file: str = "examples/demo/base.yaml", *overrides: str) -> None:
    """Print the table."""
    print(
        f"| strategy | s a step | s that training waits | s until whole | of a run that saves every {EVERY} steps "
        "| MiB saved | MiB more at the peak, rank 0 / rank 1 |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for strategy in ("ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2"):
        # A group of its own: a process's peak never falls again.
        with WorkerGroup(2, log=Path(tempfile.mkdtemp()) / "log") as group, tempfile.TemporaryDirectory() as folder:
            recipe = load_recipe(recipe_file, [f"strategy.name={strategy}", *overrides])
            found, other = group.run(cell, resolve(recipe, recipe_file), folder)
            share = found["wait"] / (EVERY * found["step"] + found["wait"])
            times = f"{found['step']:.3f} | {found['wait']:.3f} | {found['save']:.3f} | {100 * share:.1f} %"
            peaks = f"{found['size']:.0f} | {found['raised']:.0f} / {other['raised']:.0f}"
            print(f"| {strategy} | {times} | {peaks} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
