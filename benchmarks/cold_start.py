"""What the first steps cost with ``compile: true``: ``python -m benchmarks.cold_start``.

A small Llama on a CPU, one process, full rows of random tokens. Every start is a process of its own: as it is, compiled
with torch's cache empty, and compiled again with what that start has left in it. It prints the first step and the
median of the later ones in wall and processor seconds (compilers that were started for it included).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from itertools import pairwise
from typing import Any

MODEL = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 2048, "max_position_embeddings": 512,
         "tie_word_embeddings": False}  # fmt: skip
STEPS = 6


def started(compiled: bool, precision: str, cache: str) -> dict[str, Any]:
    """Seconds of each step of a run in this process, and of the compiler's."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache  # before torch
    from toolkit.benchmark import job
    from toolkit.model.compiling import compilation

    times: list[tuple[float, float]] = []

    class Timed(job._Run):
        def _after(self, pending: Any) -> None:
            super()._after(pending)
            times.append(_now())

        def _windows(self, session: Any) -> Any:
            times.append(_now())
            return super()._windows(session)

    recipe = {
        "model": {"config": MODEL},
        "tokenizer": {"path": "none"},
        "adapter": {"r": 8, "alpha": 16, "dropout": 0.1},
        "data": {"train": "built-in", "max_length": 256, "workers": 0},
        "batch": {"micro_size": 4, "accumulation": 1},
        "precision": precision,
        "activation_checkpointing": "full",
        "compile": compiled,
        "machine": {"device": "cpu", "processes": 1},
        "run": {"max_steps": STEPS, "save_every": 0},
    }
    Timed(job.Order(recipe, "cold start", "cpu", steps=STEPS, warmup=0, full=True)).turn()
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(times)]
    state = compilation()
    assert state.fell_back is None
    assert bool(state.graphs) == compiled
    return {"first": steps[0], "later": [statistics.median(kind) for kind in zip(*steps[1:], strict=True)],
            "graphs": state.graphs, "compiler": state.seconds}  # fmt: skip


def _now() -> tuple[float, float]:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.perf_counter(), sum(one.ru_utime + one.ru_stime for one in used)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"])
    given = parser.parse_args()
    # Compilers are waited for in the process that asks for them: their processor time is its children's.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    print("| precision | start | first step, s | times the plain first | later steps, s | to plain |")
    print("| --- | --- | --- | --- | --- | --- |")
    for precision in given.precision:
        found: dict[str, list[dict[str, Any]]] = {"plain": [], "cold": [], "warm": []}
        for _ in range(given.turns):
            with tempfile.TemporaryDirectory(prefix="toolkit-") as cache:
                for kind, seen in found.items():
                    with context.Pool(1) as pool:
                        seen.append(pool.apply(started, (kind != "plain", precision, cache)))
        middle = {kind: {key: [statistics.median(s[key][at] for s in seen) for at in (0, 1)]
                         for key in ("first", "later")} for kind, seen in found.items()}  # fmt: skip
        for kind, one in middle.items():
            first, later = one["first"], one["later"]
            ratio = [first[at] / middle["plain"]["first"][at] for at in (0, 1)]
            step = [later[at] / middle["plain"]["later"][at] for at in (0, 1)]
            print(f"| {precision} | {kind} | {first[0]:.2f} ({first[1]:.2f}) | {ratio[0]:.1f} ({ratio[1]:.1f}) "
                  f"| {later[0]:.3f} ({later[1]:.3f}) | {step[0]:.2f} ({step[1]:.2f}) |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
