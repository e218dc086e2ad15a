"""Tokens per second tokenised and packed, from JSONL, from Parquet and from a streamed mixture; memory that a larger
file takes.

Texts are divided so that each fits a row. Of a longer one all tokens are computed, and those of one row are kept and
counted: one row of the table has the same texts undivided. The least possible is the tokenizer alone: `tokenizers`
given all texts in one call, on every core, with nothing packed.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.floor.table import Row, timed
from benchmarks.token_cache import make_inputs

GOAL = 1e6
"""Tokens per second on two cores."""
GOALS = ("JSONL", "Parquet", "streamed mixture")
"""What is to reach it."""
ALONE = "the tokenizer alone, one call"
LENGTH = 1024
FILES = (1, 4, 16)
"""How many times as long as the texts a streamed file is. The allocator's own stock grows with the first of them."""


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


def alone(folder: Path, file: Path) -> tuple[float, float, int]:
    """As ``read``, of the tokenizer alone."""
    from transformers import AutoTokenizer

    backend = AutoTokenizer.from_pretrained(folder / "tokenizer").backend_tokenizer
    texts = [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines()]
    begun = time.perf_counter()
    tokens = sum(len(encoding.ids) for encoding in backend.encode_batch_fast(texts))
    seconds = time.perf_counter() - begun
    return tokens / seconds, seconds, 0


def fitting(text: str, tokenizer: Any) -> Iterator[str]:
    """``text`` in pieces that fit a row, with the token that ends each."""
    offsets = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    starts = [offsets[at][0] for at in range(0, len(offsets), LENGTH - 1)]
    return (text[start:end] for start, end in itertools.pairwise([*starts, len(text)]))


def measure(quick: bool) -> list[Row]:
    import pyarrow
    import pyarrow.parquet
    from transformers import AutoTokenizer

    turns, megabytes = (1, 0.25) if quick else (3, 12.0)
    rows = []
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder, megabytes)
        longer, fits = folder / "train.jsonl", folder / "fitting.jsonl"
        tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
        whole = [json.loads(line)["text"] for line in longer.read_text(encoding="utf-8").splitlines()]
        texts = [piece for text in whole for piece in fitting(text, tokenizer)]
        lines = [json.dumps({"text": text}) for text in texts]
        fits.write_text("\n".join(lines) + "\n", encoding="utf-8")
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "train.parquet")
        jsonl, parquet = str(fits), str(folder / "train.parquet")
        mixture = [{"path": jsonl, "proportion": 0.5}, {"path": parquet, "proportion": 0.5}]
        kinds = {
            "JSONL": (jsonl, False, None), "Parquet": (parquet, False, None),
            "streamed mixture": (mixture, True, 20 if quick else 2000),
            "JSONL, texts cut off at a row": (str(longer), False, None),
        }  # fmt: skip
        found: dict[str, list[tuple[float, float, int]]] = {kind: [] for kind in (*kinds, ALONE)}
        for _ in range(turns):
            for kind, (train, streaming, windows) in kinds.items():
                with context.Pool(1) as pool:
                    found[kind].append(pool.apply(read, (folder, train, streaming, windows)))
            with context.Pool(1) as pool:
                found[ALONE].append(pool.apply(alone, (folder, fits)))
        grown = []
        for times in FILES:
            file = folder / f"{times}.jsonl"
            file.write_text(("\n".join(lines) + "\n") * times, encoding="utf-8")
            with context.Pool(1) as pool:
                grown.append(pool.apply(read, (folder, str(file), True, (20 if quick else 2000) * times))[2])
    for kind, measured in found.items():
        rates = [rate for rate, _, _ in measured]
        figures = f"{sorted(rates)[len(rates) // 2]:,.0f} tokens/s to {GOAL:,.0f}"
        goal = 1.0 if kind in GOALS else None
        rows.append(timed("data", kind, [rate / GOAL for rate in rates], figures, goal=goal, least=True))
    for kind in GOALS:
        ratios = [rate / bare for (rate, _, _), (bare, _, _) in zip(found[kind], found[ALONE], strict=True)]
        rows.append(timed("data", f"{kind}, to the tokenizer alone", ratios))
    figures = ", ".join(f"{size / 2**20:,.0f}" for size in grown)
    what = f"MiB that a stream of {', '.join(map(str, FILES))} times the file takes; the last to the one before"
    rows.append(Row("data", what, grown[-1] / max(1, grown[-2]), figures, 1.1))
    return rows
