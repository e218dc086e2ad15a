"""Share of the machine's matrix-product peak that a training step in one process reaches."""

from __future__ import annotations

import importlib.util
import time
from itertools import pairwise

import torch

from benchmarks.floor.host import LIMIT, QUIET
from benchmarks.floor.loops import LOOPS, Work, llama
from benchmarks.floor.table import Row, timed
from toolkit.launch.group import WorkerGroup

GOALS = {False: 0.92, True: 0.85}
"""By whether products are in bf16."""


def peak_job(bf16: bool, size: int) -> float:
    """FLOP/s of products of square matrices: the fastest of several."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    one, other = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    seconds = []
    for _ in range(8):
        begun = time.perf_counter()
        torch.mm(one, other)
        seconds.append(time.perf_counter() - begun)
    return 2 * size**3 / min(seconds)


def rate_job(name: str, work: Work, steps: int) -> float:
    """Model FLOP/s: six for each weight of a product and token, and attention's; the fastest step after the first."""
    ended: list[float] = []
    LOOPS[name](work, 1 + steps, lambda: ended.append(time.perf_counter()))
    fastest = min(b - a for a, b in pairwise(ended))
    return step_flops(work) / fastest


def step_flops(work: Work) -> float:
    """Floating point operations of one optimizer step, without recomputation. Causal attention is counted as half of
    the square."""
    model = work.model
    width, inner, layers = model["hidden_size"], model["intermediate_size"], model["num_hidden_layers"]
    weights = layers * (4 * width**2 + 3 * width * inner) + width * model["vocab_size"]
    tokens = work.accumulation * work.rows * work.length
    attention = layers * 2 * width * work.length  # per token, the two products over half of the row
    return tokens * (6.0 * weights + 3.0 * attention)


def measure(quick: bool) -> list[Row]:
    turns, steps, size = (1, 1, 128) if quick else (3, 2, 2048)
    peers = ["bare", "toolkit", "toolkit compiled", "trainer"]
    if importlib.util.find_spec("trl") and importlib.util.find_spec("datasets"):
        peers.append("sft")
    rows = []
    for bf16 in (False, True):
        model = llama(2, 64) if quick else llama(12, 768, vocabulary=2048)
        work = Work(model, rows=2, length=32 if quick else 256, bf16=bf16)
        groups = {name: WorkerGroup(1, threads=torch.get_num_threads(), log=QUIET) for name in peers}
        shares: dict[str, list[float]] = {name: [] for name in peers}
        highest = 0.0
        try:
            for _ in range(turns):
                for name, group in groups.items():
                    # Measured next to each run: a processor's clock changes with its load.
                    peak = group.run(peak_job, bf16, size, timeout=LIMIT)[0]
                    shares[name].append(group.run(rate_job, name, work, steps, timeout=LIMIT)[0] / peak)
                    highest = max(highest, peak)
        finally:
            for group in groups.values():
                group.close()
        kind = "bf16" if bf16 else "fp32"
        for name in peers:
            goal = GOALS[bf16] if name == "toolkit" else None
            text = f"peak {highest / 1e9:,.0f} GFLOP/s"
            rows.append(timed("peak", f"{name}, {kind}", shares[name], text, goal=goal, least=True))
    return rows
