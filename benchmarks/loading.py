"""Host memory and bytes read while a model is loaded by part, next to ``from_pretrained`` in every process, and while
checkpoints are saved, resumed and exported.

``python -m benchmarks.loading OUT.md [--gigabytes 1] [--processes 1 2 4]`` saves a Llama with random weights in float32
as safetensors, and writes a row for each strategy and number of processes, all on one machine without a GPU. Cells that
this machine's free memory is too small for are left out.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import tempfile
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks import checkpoints, upstream
from benchmarks.measuring import MIB, available, forget_peak, moved, status
from toolkit.launch.group import WorkerGroup
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.results import versions
from toolkit.strategies import resolve

WIDTH, FEED, VOCABULARY = 1024, 4096, 16_384
STRATEGIES = ("zero3", "fsdp1", "fsdp2")
LARGEST = 4 * VOCABULARY * WIDTH
RESERVE = 3 * 2**30
"""Bytes that other work on the machine keeps, and the processes themselves."""


def fits(gigabytes: float, strategy: str, processes: int, by_part: bool) -> bool:
    """Whether a cell fits into the memory that is free. DeepSpeed's engine keeps five copies of a part in float32."""
    parts = 5 if strategy == "zero3" else 1 if strategy == "fsdp2" else 2
    return gigabytes * 1e9 * (parts + (0 if by_part else processes)) < available() - RESERVE


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


def load(resolved: Resolved, tiny: Resolved, by_part: bool) -> dict[str, Any]:
    """Bytes that this process's peak grows by until it has its weights, and until the engine can train; bytes that it
    reads. ``tiny`` is loaded before: everything is imported then."""
    from toolkit.model.silence import silence_libraries
    from toolkit.strategies import strategy_of
    from toolkit.strategies.engines import zero
    from toolkit.strategies.engines.connect import make_accelerator
    from toolkit.training.preparation import prepare_model

    silence_libraries()

    def built(case: Resolved) -> tuple[Any, str | None]:
        accelerator = make_accelerator(case)
        prepared = prepare_model(case, 0, together=by_part)
        return strategy_of(case).engine_class()(prepared, accelerator), prepared.loaded_whole

    engine, _ = built(tiny)
    del engine
    before, read = forget_peak(), moved("rchar")
    with_weights: list[int] = []

    def split(*arguments: Any) -> None:
        right(*arguments)
        with_weights.append(status("VmHWM"))

    right = zero._split  # DeepSpeed makes masters and buffers after it; FSDP's engines have nothing beside the weights
    with mock.patch.object(zero, "_split", split):
        engine, whole = built(resolved)
    peak = status("VmHWM")
    return {
        "weights": (with_weights or [peak])[0] - before, "engine": peak - before, "read": moved("rchar") - read,
        "whole": whole, "claims": len(engine.evidence()),
    }  # fmt: skip


def measure(folder: Path, gigabytes: float, world: int) -> list[dict[str, Any]]:
    """A cell for each strategy, source of the weights and way to load them."""
    rows = []
    tiny: dict[str, Any] = {"config": config(0.001) | {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64}}
    models: dict[str, dict[str, Any]] = {"files": {"path": str(folder)}, "config": {"config": config(gigabytes)}}
    with WorkerGroup(world) as group:
        small = folder.parent / "small"
        if not small.is_dir():
            group.run(upstream.save_tiny, str(small), tiny["config"], timeout=300)
        jobs: dict[str, Any] = {
            "transformers": (upstream.from_pretrained, str(folder), tiny["config"]),
            "accelerate": (upstream.efficient, str(folder), str(small), str(folder.parent)),
        }
        for way, job in jobs.items():
            if fits(gigabytes, "fsdp2", world if way == "transformers" else 1, by_part=False):
                rows.append({"strategy": way, "processes": world, "ranks": group.run(*job, timeout=3000)})
                print(json.dumps(rows[-1]), flush=True)
        for strategy, source in product(STRATEGIES, models):
            for by_part in (True, False):
                if not fits(gigabytes, strategy, world, by_part):
                    continue
                cases = (resolved_for(strategy, world, one) for one in (models[source], tiny))
                found = group.run(load, *cases, by_part, timeout=3000)
                most = _most(found, ("weights", "engine", "read"))
                rows.append({"strategy": strategy, "processes": world, "source": source, "by_part": by_part,
                             "whole": found[0]["whole"]} | most)  # fmt: skip
                print(json.dumps(rows[-1]), flush=True)
    return rows


def _most(found: list[dict[str, Any]], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: max(one[key] for one in found) for key in keys}


def page(rows: list[dict[str, Any]], kept: list[dict[str, Any]], size: int) -> str:
    """The measurements as a page of docs."""
    packages = ", ".join(f"{name} {version}" for name, version in versions().items())
    lines = [
        "# Loading, saving and exporting by part", "",
        f"`python -m benchmarks.loading`: a Llama of {size / MIB:,.0f} MiB in float32, largest weight "
        f"{LARGEST / MIB:.0f} MiB, loaded by N processes on a CPU. MiB that the highest resident memory "
        "of a process grows by until it has its weights, the largest of the N, and MiB that it reads. «whole»: every "
        "process loads the whole model before it is sharded, as `from_pretrained` does. «of that»: by part, as a ratio "
        "to the part and the largest weight; what an empty process takes is in neither. «engine»: until "
        "the first step can begin. An empty cell did not fit into the machine's free memory. "
        "DeepSpeed's engine makes masters, gradients and a bucket before it, FSDP's nothing.",
        "",
        "| strategy | N | from | model/N + largest | by part | of that | whole | engine by part | engine whole | "
        "read by part | read whole |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    by_key = {(r["strategy"], r["processes"], r["source"], r["by_part"]): r for r in rows if "source" in r}
    for strategy, world, source in dict.fromkeys(key[:3] for key in by_key):
        ways = [by_key.get((strategy, world, source, by_part), {}) for by_part in (True, False)]
        numbers = [size / world + LARGEST, *(way.get(key) for key in ("weights", "engine", "read") for way in ways)]
        cells = ["" if number is None else f"{number / MIB:,.0f}" for number in numbers]
        cells.insert(2, "" if numbers[1] is None else f"{numbers[1] / numbers[0]:.2f}")
        lines.append(f"| {strategy} | {world} | {source} | {' | '.join(cells)} |")
    lines += ["", *upstream.section(rows, size)]
    lines += ["", *checkpoints.section(kept, size, LARGEST)]
    return "\n".join([*lines, "", f"{datetime.date.today()}; {packages}", ""])


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
        rows: list[dict[str, Any]] = []
        kept: list[dict[str, Any]] = []

        def cases(strategy: str, world: int) -> tuple[Resolved, Resolved]:
            tiny = config(0.001) | {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64}
            large: dict[str, Any] = {"path": str(folder)}
            return resolved_for(strategy, world, large), resolved_for(strategy, world, {"config": tiny})

        room = partial(fits, arguments.gigabytes)
        for world in arguments.processes:
            rows += measure(folder, arguments.gigabytes, world)
            last = world == arguments.processes[-1]
            kept += checkpoints.measure(Path(temporary), cases, world, STRATEGIES, room, last)
            arguments.out.write_text(page(rows, kept, size), encoding="utf-8")


if __name__ == "__main__":
    main()
