"""Host memory and bytes read while a model is loaded by part, next to ``from_pretrained`` in every process.

``python -m benchmarks.loading OUT.md [--gigabytes 1] [--processes 1 2 4]`` saves a Llama with random weights in float32
as safetensors, and writes a row for each strategy and number of processes, all on one machine without a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import multiprocessing
import os
import tempfile
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

from toolkit.launch.group import WorkerGroup
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.results import versions
from toolkit.strategies import resolve

MIB = 2**20
WIDTH, FEED, VOCABULARY = 1024, 4096, 16_384
STRATEGIES = ("zero3", "fsdp1", "fsdp2")


def config(gigabytes: float) -> dict[str, Any]:
    """A Llama of about so many GB in float32. Its embedding and its head are the largest weights, 64 MiB each."""
    of_block = 4 * (4 * WIDTH * WIDTH + 3 * WIDTH * FEED)
    blocks = max(1, round((gigabytes * 1e9 - 8 * VOCABULARY * WIDTH) / of_block))
    return {"model_type": "llama", "hidden_size": WIDTH, "intermediate_size": FEED, "num_hidden_layers": blocks,
            "num_attention_heads": 16, "vocab_size": VOCABULARY, "tie_word_embeddings": False}  # fmt: skip


def resolved_for(strategy: str, processes: int, model: dict[str, Any]) -> Resolved:
    """A recipe that loads ``model``, its section; nothing is trained."""
    values = {
        "model": model, "tokenizer": {"path": "."}, "data": {"train": "train.jsonl", "max_length": 16},
        "batch": {"micro_size": 1}, "optimizer": {"name": "sgd", "lr": 0.1}, "precision": "fp32",
        "strategy": {"name": strategy}, "machine": {"device": "cpu", "processes": processes},
        "run": {"max_steps": 1, "output_dir": "run"},
    }  # fmt: skip
    return resolve(Recipe.model_validate(values))


def save(folder: str, gigabytes: float) -> None:
    """Make the model and save it, in several files."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config(gigabytes))).save_pretrained(
        folder, max_shard_size="500MB"
    )


def _status(key: str) -> int:
    """Bytes: ``VmRSS`` is resident now, ``VmHWM`` was at most since ``_forget_peak``."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)]
    return int(line.split()[1]) * 1024


def _forget_peak() -> int:
    """Give what is free to the system and begin a new peak; bytes that are resident now."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets VmHWM
    return _status("VmRSS")


def _read() -> int:
    [line] = [line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar")]
    return int(line.split()[1])


def load(resolved: Resolved, tiny: Resolved, by_part: bool) -> dict[str, Any]:
    """Bytes that this process's peak grows by until it has its weights, and until the engine can train; bytes that it
    reads. ``tiny`` is loaded before: everything is imported then."""
    from toolkit.model.silence import silence_libraries
    from toolkit.strategies import strategy_of
    from toolkit.strategies.engines import zero
    from toolkit.strategies.engines.connect import make_accelerator
    from toolkit.training.session import prepare_model

    silence_libraries()

    def built(case: Resolved) -> tuple[Any, str | None]:
        accelerator = make_accelerator(case)
        prepared = prepare_model(case, 0, together=by_part)
        return strategy_of(case).engine_class()(prepared, accelerator), prepared.loaded_whole

    engine, _ = built(tiny)
    del engine
    before, read = _forget_peak(), _read()
    with_weights: list[int] = []

    def split(*arguments: Any) -> None:
        right(*arguments)
        with_weights.append(_status("VmHWM"))

    right = zero._split  # DeepSpeed makes masters and buffers after it; FSDP's engines have nothing beside the weights
    with mock.patch.object(zero, "_split", split):
        engine, whole = built(resolved)
    peak = _status("VmHWM")
    return {
        "weights": (with_weights or [peak])[0] - before, "engine": peak - before, "read": _read() - read,
        "whole": whole, "claims": len(engine.evidence()),
    }  # fmt: skip


def measure(folder: Path, gigabytes: float, processes: list[int]) -> list[dict[str, Any]]:
    """A cell for each strategy, number of processes, source of the weights and way to load them."""
    rows = []
    tiny: dict[str, Any] = {"config": config(0.001) | {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64}}
    models: dict[str, dict[str, Any]] = {"files": {"path": str(folder)}, "config": {"config": config(gigabytes)}}
    for world in processes:
        with WorkerGroup(world) as group:
            for strategy, source in product(STRATEGIES, models):
                for by_part in (True, False):
                    cases = (resolved_for(strategy, world, one) for one in (models[source], tiny))
                    found = group.run(load, *cases, by_part, timeout=3000)
                    most = {key: max(one[key] for one in found) for key in ("weights", "engine", "read")}
                    rows.append({"strategy": strategy, "processes": world, "source": source, "by_part": by_part,
                                 "whole": found[0]["whole"]} | most)  # fmt: skip
                    print(json.dumps(rows[-1]), flush=True)
    return rows


def page(rows: list[dict[str, Any]], size: int) -> str:
    """The measurements as a page of docs."""
    told = ", ".join(f"{name} {version}" for name, version in versions().items())
    lines = [
        "# Loading by part", "",
        f"`python -m benchmarks.loading`: a Llama of {size / MIB:,.0f} MiB in float32, largest weight "
        f"{4 * VOCABULARY * WIDTH / MIB:.0f} MiB, loaded by N processes on a CPU. MiB that the highest resident memory "
        "of a process grows by until it has its weights, the largest of the N, and MiB that it reads. «whole»: every "
        "process loads the whole model before it is sharded, as `from_pretrained` does. «engine»: until "
        "the first step can begin. DeepSpeed's engine makes masters, gradients and a bucket before it, FSDP's nothing.",
        "",
        "| strategy | N | from | model/N + largest | by part | whole | engine by part | engine whole | read by part | "
        "read whole |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    by_key = {(r["strategy"], r["processes"], r["source"], r["by_part"]): r for r in rows}
    for (strategy, world, source, by_part), row in by_key.items():
        if not by_part:
            continue
        other = by_key[strategy, world, source, False]
        bound = size / world + 4 * VOCABULARY * WIDTH
        numbers = [bound, *(one[key] for key in ("weights", "engine", "read") for one in (row, other))]
        cells = " | ".join(f"{number / MIB:,.0f}" for number in numbers)
        lines.append(f"| {strategy} | {world} | {source} | {cells} |")
    return "\n".join([*lines, "", told, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        saving = multiprocessing.get_context("spawn").Process(target=save, args=(str(folder), arguments.gigabytes))
        saving.start()
        saving.join()
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        rows = measure(folder, arguments.gigabytes, arguments.processes)
        arguments.out.write_text(page(rows, size), encoding="utf-8")


if __name__ == "__main__":
    main()
