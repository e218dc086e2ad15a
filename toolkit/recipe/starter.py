"""`toolkit init`: a starter recipe with comments, from answers or flags."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from toolkit.errors import InputError
from toolkit.machine import cuda_device_count
from toolkit.recipe import json_schema
from toolkit.recipe.load import load_recipe, validate
from toolkit.recipe.positions import parse
from toolkit.tasks import task_names


def init_command(output: str, answers: dict[str, Any], force: bool) -> None:
    """Write a recipe to ``output``, and its JSON schema next to it.

    Raises InputError, without writing anything, if the recipe already exists or an answer is invalid.
    """
    target = Path(output)
    if target.exists() and not force:
        raise InputError(f"{output}: already exists; --force overwrites it, -o selects another file")
    if sys.stdin.isatty():
        _ask(answers)
    text = starter(answers)
    validate(parse(text, output))
    schema = target.parent / json_schema.FILE_NAME
    json_schema.write_schema(schema, force=force)
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{output}: {error.strerror}") from None
    load_recipe(output)
    print(f"wrote {output} and {schema}\nnext: toolkit train {output}")


_QUESTIONS = (
    ("model", "model (hub id or folder)", "meta-llama/Llama-3.2-1B"),
    ("data", "training data (JSONL, Parquet, folder or hub id)", "data/train.jsonl"),
    ("format", "format of a sample: text, prompt-completion, messages", "text"),
    ("lora", "LoRA rank (0: train every weight)", 16),
    ("steps", "optimizer steps", 500),
)


def _ask(answers: dict[str, Any]) -> None:
    import typer

    for key, question, default in _QUESTIONS:
        if answers[key] is None:
            answers[key] = typer.prompt(question, default=default)


def starter(answers: dict[str, Any]) -> str:
    """The text of a recipe. Answers that are None get a default for this machine."""
    gpus = cuda_device_count()
    processes = answers["processes"] or max(1, gpus)
    lora = 16 if answers["lora"] is None else answers["lora"]
    spread = "zero2" if lora else "fsdp2"
    strategy = answers["strategy"] or ("single" if processes == 1 else spread)
    precision = answers["precision"] or ("bf16" if gpus else "fp32")
    adapter = (
        f"{{method: lora, r: {lora}, alpha: {2 * lora}, dropout: 0.05, target_modules: all-linear}}" if lora else "null"
    )
    lr = "2.0e-4" if lora else "2.0e-5"
    return f"""\
{json_schema.COMMENT}# toolkit train {{this file}} · toolkit config {{this file}} -o launch --explain
model:
  path: {_text(answers["model"] or "meta-llama/Llama-3.2-1B")}     # hub id or folder
  task: causal-lm                     # {" | ".join(task_names())}
adapter: {adapter}
data:
  train: {_text(answers["data"] or "data/train.jsonl")}
  eval: null                          # held-out data, the same format
  format: {answers["format"] or "text"}
  max_length: 1024
batch: {{micro_size: 2, accumulation: 4}}   # per process
optimizer: {{lr: {lr}, weight_decay: 0.0, max_grad_norm: 1.0}}
schedule: {{name: cosine, warmup_ratio: 0.03}}
precision: {precision}                       # fp32 | bf16 | fp16 | bf16-pure
activation_checkpointing: none        # none | selective | full: less memory, more time
strategy: {{name: {strategy}}}             # single | ddp | zero1 | zero2 | zero3 | fsdp1 | fsdp2
machine: {{device: auto, processes: {processes}}}
run: {{max_steps: {answers["steps"] or 500}, seed: 0, output_dir: runs/first, save_every: 100}}
"""


def _text(value: str) -> str:
    """A YAML scalar; quoted where plain text would mean something else."""
    plain = all(c.isalnum() or c in "/._-" for c in value) and not value.startswith("-")
    return value if plain else "'" + value.replace("'", "''") + "'"
