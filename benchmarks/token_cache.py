"""What a start costs with and without the cache of tokens: ``python -m benchmarks.token_cache``.

Real text: the sources of Python's standard library, one function or class a sample, with a byte-level BPE trained on
them. Every opening is a process of its own; kinds take turns. It prints medians of wall and processor seconds from an
imported tokenizer to samples that can be read (the key, the check of the sum, and every import they need included).
"""

from __future__ import annotations

import argparse
import ast
import json
import multiprocessing
import statistics
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any


def library_samples(least_bytes: int) -> list[str]:
    """Functions and classes of Python's standard library, until there are so many bytes of them."""
    found: list[str] = []
    total = 0
    for file in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" in file.parts or "test" in file.parts or total >= least_bytes:
            continue
        try:
            text = file.read_text(encoding="utf-8")
            nodes = ast.parse(text).body
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (part := ast.get_source_segment(text, node)):
                found.append(part)
                total += len(part.encode())
    return found


def make_inputs(folder: Path, megabytes: float) -> int:
    """train.jsonl and a tokenizer in ``folder``; returns the number of samples."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    samples = library_samples(int(megabytes * 2**20))
    with (folder / "train.jsonl").open("w", encoding="utf-8") as file:
        for text in samples:
            file.write(json.dumps({"text": text}) + "\n")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=16384, special_tokens=["</s>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())  # fmt: skip
    bpe.train_from_iterator(samples[:2000], trainer)
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>").save_pretrained(folder / "tokenizer")
    return len(samples)


def opened(folder: Path, cache: str | bool) -> dict[str, Any]:
    """Open the data once, in this process."""
    import resource

    from transformers import AutoTokenizer

    from toolkit.data.loader import open_data
    from toolkit.recipe.schema import Recipe

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    recipe = Recipe.model_validate({"model": {"config": {"model_type": "llama"}}, "run": {"max_steps": 1},
                                    "data": {"train": str(folder / "train.jsonl"), "cache": cache}})  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wall, cpu = time.perf_counter(), time.process_time()
    samples: Any = open_data(recipe, "train", tokenizer)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return {"from": samples.came.came, "wall": wall, "cpu": cpu, "tokens": int(samples.lengths().sum()), "grown": grown}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[0.25, 1, 4, 16])
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    print("| MiB of text | samples | tokens | without, s | made and kept, s | from the cache, s | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for megabytes in arguments.megabytes:
        with tempfile.TemporaryDirectory(prefix="toolkit-") as name:
            folder = Path(name)
            samples = make_inputs(folder, megabytes)
            times: dict[str, list[dict[str, Any]]] = {"memory": [], "made": [], "cache": []}
            for turn in range(arguments.turns):
                for cache in (False, str(folder / f"kept{turn}"), str(folder / f"kept{turn}")):
                    with context.Pool(1) as pool:
                        one = pool.apply(opened, (folder, cache))
                    times[one["from"]].append(one)
            shown = {kind: (statistics.median(t["wall"] for t in seen), statistics.median(t["cpu"] for t in seen))
                     for kind, seen in times.items()}  # fmt: skip
            cells = " | ".join(f"{wall:.3f} ({cpu:.3f})" for wall, cpu in shown.values())
            ratio = f"{shown['memory'][0] / shown['cache'][0]:.1f} ({shown['memory'][1] / shown['cache'][1]:.1f})"
            print(f"| {megabytes:g} | {samples:,} | {times['cache'][0]['tokens']:,} | {cells} | {ratio} |", flush=True)


if __name__ == "__main__":
    main()
