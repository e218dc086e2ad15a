"""Predictions of `plan` held against GPU measurements that others published.

``python -m benchmarks.outside MEASUREMENTS.jsonl [-o TABLE.md]``: rows of foundation-model-stack/fms-acceleration that
ran the Trainer's own kernels on one A100 with rows of a fixed length. Each is predicted from what the row says about
its configuration; nothing is fitted. The collection of rows is not part of this repository.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIB = 2**30
# Shapes as the models' own config.json files publish them.
_MISTRAL: dict[str, Any] = {
    "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 32768,
    "sliding_window": 4096, "tie_word_embeddings": False,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "mistralai/Mistral-7B-v0.1": _MISTRAL,
    "NousResearch/Llama-2-70b-hf": _MISTRAL | {
        "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "max_position_embeddings": 4096, "sliding_window": None,
    },
}  # fmt: skip
SOURCE, LOOP = "foundation-model-stack/fms-acceleration", "trainer-4.48"


@dataclass(frozen=True)
class Row:
    """One measurement, and what is predicted for it in bytes; ``left_out``: why nothing is."""

    id: str
    what: str
    measured: float
    predicted: int = 0
    left_out: str = ""

    @property
    def error(self) -> float:
        return self.predicted / GIB / self.measured - 1


def chosen(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of the source that say how much was allocated by the Trainer's own kernels."""
    return [
        row
        for row in rows
        if row["source_repo"] == SOURCE and row.get("kernel_family") == "hf" and "peak_allocated_gib" in row
    ]


def why_left_out(row: dict[str, Any]) -> str:
    """Why a row is not predicted; empty if it is."""
    if row["quality"] != "exact" or "seq_len" not in row:
        return "its rows are of unknown lengths"
    if row["world"] != 1:
        return "not one GPU"
    if row["model"] not in MODELS:
        return "its model's own loss in transformers 4.48 is not the common one, or experts are quantised"
    if "GPTQ" in str(row.get("quantization")):
        return "a base quantised by GPTQ"
    if "fp32" in row["notes"] and "Skips the fp32 upcast" not in row["notes"]:
        return "prepare_model_for_kbit_training keeps norms, embeddings and head in float32"
    return ""


def recipe(row: dict[str, Any]) -> dict[str, Any]:
    """The recipe that says what the row says."""
    adapter = None
    if row["task"] in ("lora", "qlora"):
        found = row["adapter"]
        adapter = {"method": row["task"], "r": found["r"], "alpha": float(found["lora_alpha"]),
                   "dropout": found["lora_dropout"], "target_modules": found["target_modules"]}  # fmt: skip
    return {
        "model": {"config": MODELS[row["model"]], "attention": "flash_attention_2"},
        "tokenizer": {"path": "none"},
        "data": {"train": "none", "max_length": row["seq_len"]},
        "batch": {"micro_size": row["micro_batch"], "accumulation": 1},
        "adapter": adapter,
        "precision": "bf16" if row["precision"]["autocast"] else "bf16-pure",
        "optimizer": {"kernel": "foreach", "decay": "all"},  # the Trainer decays embeddings
        "activation_checkpointing": "full",
        "strategy": {"name": "single"},
        "machine": {"device": "cuda", "processes": 1},
        "run": {"max_steps": 2},
    }


def predicted(row: dict[str, Any]) -> int:
    """Bytes at the peak of the step, without the CUDA context, which `max_memory_allocated` does not count."""
    from toolkit.planning.predict import Planner
    from toolkit.planning.unneeded import without
    from toolkit.recipe.schema import Recipe
    from toolkit.strategies import resolve

    resolved = resolve(Recipe.model_validate(recipe(row)), "row", device="cuda")
    with without("bitsandbytes"):
        return Planner.of(resolved, row["seq_len"], LOOP).memory(resolved).peak


def held_against(rows: list[dict[str, Any]]) -> list[Row]:
    """Every row of the source, predicted or left out."""
    found = []
    for row in chosen(rows):
        size = f"{row['micro_batch']} x {row['seq_len']}" if "seq_len" in row else f"{row['micro_batch']} x ?"
        precision = "bf16 autocast" if row["precision"]["autocast"] else "pure 16 bits"
        what = f"{row['model'].split('/')[-1]}, {row['task']}, {precision}, {size}, {row['world']} GPU"
        reason = why_left_out(row)
        found.append(Row(row["id"], what, row["peak_allocated_gib"], 0 if reason else predicted(row), reason))
    return found


def table(rows: list[Row]) -> list[str]:
    """The predicted rows, and how many are left out for which reason."""
    told = [row for row in rows if not row.left_out]
    errors = [row.error for row in told]
    lines = [
        f"{len(told)} rows: median error {statistics.median(map(abs, errors)):.1%}, from {min(errors):+.1%} to "
        f"{max(errors):+.1%}.",
        "",
        "| row | configuration | measured GiB | predicted GiB | error |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [f"| {r.id} | {r.what} | {r.measured:.2f} | {r.predicted / GIB:.2f} | {r.error:+.1%} |" for r in told]
    reasons = [row.left_out for row in rows if row.left_out]
    lines += ["", "| left out because | rows |", "| --- | --- |"]
    lines += [f"| {reason} | {reasons.count(reason)} |" for reason in sorted(set(reasons))]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurements", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    rows = [json.loads(line) for line in given.measurements.read_text(encoding="utf-8").splitlines()]
    text = "\n".join(table(held_against(rows))) + "\n"
    sys.stdout.write(text)
    if given.output:
        given.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
