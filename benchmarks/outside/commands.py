"""Rows that a command line can express: predicted by ``toolkit plan``, and shown with that command.

Anassbzdd/fitcheck: a bare loop on a Tesla T4, torch 2.14, transformers 5.17, PEFT 0.20; every second step measured.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.outside.fms import WORKSPACE
from toolkit.planning.command import Request, make_plan
from toolkit.recipe.shapes import shape_of

GIB = 2**30
FITCHECK = "Anassbzdd/fitcheck"
_LLAMA = {"model_type": "llama", "tie_word_embeddings": False}
_HUB = {
    "Qwen2.5-7B": "Qwen/Qwen2.5-7B", "Qwen2.5-1.5B": "Qwen/Qwen2.5-1.5B",
    "Mistral-7B-v0.3": "mistralai/Mistral-7B-v0.3",
    "Llama-3.2-3B": "meta-llama/Llama-3.2-3B", "Llama-3.2-1B": "meta-llama/Llama-3.2-1B",
    "SmolLM2-1.7B": "HuggingFaceTB/SmolLM2-1.7B", "SmolLM2-135M": "HuggingFaceTB/SmolLM2-135M",
    "TinyLlama-1.1B": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "deepseek-coder-1.3b": "deepseek-ai/deepseek-coder-1.3b-base",
}  # fmt: skip
_OTHERS = {
    "TinyLlama-1.1B": _LLAMA
    | {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
       "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 2048},
    "deepseek-coder-1.3b": _LLAMA
    | {"hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 24, "num_attention_heads": 16,
       "num_key_value_heads": 16, "vocab_size": 32256, "max_position_embeddings": 16384},
}  # fmt: skip
"""Of their own config.json files, where `toolkit.recipe.shapes` has none."""


def why_not(row: dict[str, Any]) -> str:
    """Why no command predicts a row of the second collection; empty if one does."""
    if row["source"] == FITCHECK:
        return ""
    if "PrimeIntellect" in row["source"] or "fms-f" in row["source"] or "NeMo" in row["source"]:
        return "compiled blocks or a loop of the project's own, which no plan traces"
    if "transformers docs" in row["source"]:
        return "classification by the Trainer of a version that is not named"
    return row["quality"] if row["quality"] != "exact" else "no bytes were published"


def command(row: dict[str, Any], model: str) -> list[str]:
    """The words of ``toolkit plan`` that say what the row says."""
    adapter, method = row["adapter"], row["method"]
    words = [model, "--gpu", "t4", f"--{method}", str(adapter["r"]), "--length", str(row["length"])]
    words += ["--micro", str(row["micro"]), "--loop", "bare", "--loop-set", "autocast=false"]
    if method == "qlora":
        words += ["--loop-set", "prepare_for_kbit=true", "--loop-set", "double_quant=false"]
    targets = ",".join(adapter["targets"])
    return [*words, f"model.attention={row['attention']}", f"adapter.target_modules=[{targets}]",
            "adapter.dropout=0.0", "optimizer.max_grad_norm=null",
            "batch.accumulation=1"]  # fmt: skip


def _request(words: Sequence[str]) -> Request:
    flags: dict[str, Any] = {"loop_set": ()}
    overrides, left = [], list(words[1:])
    while left:
        word = left.pop(0)
        if not word.startswith("--"):
            overrides.append(word)
        elif word == "--loop-set":
            flags["loop_set"] += (left.pop(0),)
        else:
            value = left.pop(0)
            flags[word[2:]] = int(value) if value.isdigit() else value
    return Request(words[0], tuple(overrides), **flags)


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Every row of the second collection: with its command and what is predicted, or with the reason why not."""
    lines = ["## Rows by command", ""]
    told, errors, inside = [], [], 0
    for row in rows:
        if why_not(row):
            continue
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "config.json"
            hub = _HUB[row["model"]]
            file.write_text(json.dumps(shape_of(hub) or _OTHERS[row["model"]]), encoding="utf-8")
            one = make_plan(_request(command(row, str(file)))).candidates[0]
        size = one.memory.peak + WORKSPACE
        assert one.interval is not None
        low, high = (end / GIB for end in one.interval)
        errors.append(size / GIB / row["allocated"] - 1)
        inside += low <= row["process"] <= high
        told.append(
            f"| {row['id']} | `toolkit plan {' '.join(command(row, hub))}` | {row['allocated']:.2f} | "
            f"{size / GIB:.2f} | {errors[-1]:+.1%} | {row['process']:.2f} | {low:.1f} to {high:.1f} |"
        )
    lines += [
        f"{FITCHECK}, {len(told)} rows on a T4, to which nothing is fitted but the size of the context: allocated "
        f"bytes with a median error of {statistics.median(map(abs, errors)):.1%}, from {min(errors):+.1%} to "
        f"{max(errors):+.1%}; {inside} processes are inside the interval.",
        "",
        "| row | command | allocated GiB | predicted | error | nvidia-smi GiB | predicted |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *told,
        "",
        "No command predicts:",
        "",
    ]
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if why := why_not(row):
            reasons.setdefault((row["source"], why), []).append(row["id"])
    return [*lines, *(f"- {source}, {', '.join(ids)}: {why}" for (source, why), ids in reasons.items()), ""]
