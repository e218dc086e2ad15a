"""Tokens per second tokenised and packed, from JSONL, from Parquet and from a streamed mixture; memory that a larger
file takes."""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.floor.table import Row, timed
from benchmarks.token_cache import make_inputs

GOAL = 1e6
"""Tokens per second on two cores."""
LENGTH = 1024


def read(folder: Path, train: Any, streaming: bool, windows: int | None) -> tuple[float, float, int]:
    """Tokens per second from opening the data to its last packed row (of a stream: to ``windows`` rows), then seconds
    and bytes by which the process's peak of memory has grown. In a process of its own."""
    from transformers import AutoTokenizer

    from benchmarks.measuring import forget_peak, status
    from toolkit.data.loader import TrainLoader, open_data
    from toolkit.recipe.schema import Recipe

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    recipe = Recipe.model_validate({
        "model": {"config": {"model_type": "llama"}}, "run": {"max_steps": 1},
        "data": {"train": train, "cache": False, "packing": True, "max_length": LENGTH, "workers": 0,
                 "streaming": streaming},
    })  # fmt: skip
    before, begun = forget_peak(), time.perf_counter()
    samples = open_data(recipe, "train", tokenizer)
    loader = TrainLoader(samples, recipe, micro_size=1, accumulation=1, data_size=1, data_rank=0, device_type="cpu")
    tokens = 0
    for at, [micro] in enumerate(loader):
        tokens += int(micro.tensors["input_ids"].numel())
        if at + 1 == (windows or loader.steps_per_epoch):
            break
    seconds = time.perf_counter() - begun
    return tokens / seconds, seconds, status("VmHWM") - before


def measure(quick: bool) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    turns, megabytes = (1, 0.25) if quick else (3, 12.0)
    rows = []
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder, megabytes)
        lines = (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()
        texts = [json.loads(line)["text"] for line in lines]
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "train.parquet")
        large = folder / "large.jsonl"
        large.write_text("\n".join(lines * 4) + "\n", encoding="utf-8")
        jsonl, parquet = str(folder / "train.jsonl"), str(folder / "train.parquet")
        mixture = [{"path": jsonl, "proportion": 0.5}, {"path": parquet, "proportion": 0.5}]
        kinds = {
            "JSONL": (jsonl, False, None), "Parquet": (parquet, False, None),
            "streamed mixture": (mixture, True, 20 if quick else 2000),
            "streamed JSONL": (jsonl, True, 20 if quick else 2000),
            "streamed JSONL, four times as large": (str(large), True, 80 if quick else 8000),
        }  # fmt: skip
        found: dict[str, list[tuple[float, float, int]]] = {kind: [] for kind in kinds}
        for _ in range(turns):
            for kind, (train, streaming, windows) in kinds.items():
                with context.Pool(1) as pool:
                    found[kind].append(pool.apply(read, (folder, train, streaming, windows)))
    for kind in ("JSONL", "Parquet", "streamed mixture"):
        rates = [rate for rate, _, _ in found[kind]]
        told = f"{sorted(rates)[len(rates) // 2]:,.0f} tokens/s to {GOAL:,.0f}"
        rows.append(timed("data", kind, [rate / GOAL for rate in rates], told, goal=1.0, least=True))
    small, grown = (min(memory for _, _, memory in found[kind])
                    for kind in ("streamed JSONL", "streamed JSONL, four times as large"))  # fmt: skip
    told = f"{grown / 2**20:,.0f} MiB to {small / 2**20:,.0f}"
    rows.append(Row("data", "memory of a stream of four times the file", grown / max(1, small), told, 1.1))
    return rows
