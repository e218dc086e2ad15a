"""Seconds from ``toolkit train`` to the end of its first step, less those of the imports that a bare script makes.

Cold: Python finds no compiled files (an empty ``PYTHONPYCACHEPREFIX``). The system's file cache is warm in both.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from benchmarks.floor.host import LIMIT
from benchmarks.floor.loops import Work, llama
from benchmarks.floor.table import Row, timed

IMPORTS = "import torch, peft; from transformers import AutoModelForCausalLM; AutoModelForCausalLM.from_config"
GOAL = 1.5
"""Seconds over the imports of a bare script."""


def imports(environment: dict[str, str]) -> float:
    """Seconds of a process that only imports."""
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", IMPORTS], check=True, env=environment, timeout=LIMIT)
    return time.perf_counter() - begun


def first_step(recipe: Path, run: Path, environment: dict[str, str]) -> float:
    """Seconds until the first line of ``metrics.jsonl``. Raises RuntimeError if the run ends without one."""
    begun, metrics = time.perf_counter(), run / "metrics.jsonl"
    command = [sys.executable, "-m", "toolkit", "train", str(recipe), f"run.output_dir={run}"]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            while not (metrics.exists() and metrics.stat().st_size):
                if process.poll() is not None and not metrics.exists():
                    output.seek(0)
                    raise RuntimeError(output.read())
                time.sleep(0.01)
            return time.perf_counter() - begun
        finally:
            process.wait(LIMIT)


def measure(quick: bool) -> list[Row]:
    turns = 1 if quick else 3
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for size in (1,) if quick else (1, 2):
            recipe = Work(llama(2, 32), rows=2, processes=size).recipe(1)
            recipe["tokenizer"] = {"path": str(_tokenizer(folder))}
            text = folder / "train.jsonl"
            text.write_text('{"text": "one sample of text"}\n' * 64)
            recipe["data"] |= {"train": str(text)}
            file = folder / f"recipe{size}.yaml"
            file.write_text(yaml.safe_dump(recipe))
            for cold in (False,) if quick else (False, True):
                over = []
                for turn in range(turns):
                    compiled = [str(folder / f"{kind}{size}{turn}") for kind in ("script", "toolkit")]
                    one, other = (
                        {**os.environ, **({"PYTHONPYCACHEPREFIX": prefix} if cold else {})} for prefix in compiled
                    )
                    script = imports(one)
                    over.append(first_step(file, folder / f"run{size}{cold}{turn}", other) - script)
                what = f"{'cold' if cold else 'warm'}, {size} process{'es' if size > 1 else ''}"
                rows.append(timed("start", what, over, f"{script:.2f} s of imports, the last turn's", goal=GOAL))
    return rows


def _tokenizer(folder: Path) -> Path:
    """A tokenizer of single bytes, saved once in ``folder``."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    target = folder / "tokenizer"
    if not target.exists():
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        words = {token: at for at, token in enumerate(["<pad>", "</s>", *letters])}
        bytes_only = Tokenizer(models.BPE(words, []))
        bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        PreTrainedTokenizerFast(tokenizer_object=bytes_only, pad_token="<pad>", eos_token="</s>").save_pretrained(
            target
        )
    return target
