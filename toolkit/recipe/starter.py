"""`toolkit init`: a starter recipe with comments, from answers or flags."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from toolkit.errors import InputError
from toolkit.machine import cuda_device_count
from toolkit.recipe import json_schema
from toolkit.recipe.example_row import example_row
from toolkit.recipe.load import load_recipe, validate
from toolkit.recipe.model_facts import looks_local, model_facts
from toolkit.recipe.positions import parse
from toolkit.recipe.schema import PrecisionName, Recipe
from toolkit.recipe.strategy_names import strategy_names
from toolkit.tasks import task_of


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
    recipe = load_recipe(output)
    print(f"wrote {output} and {schema}")
    for note in _missing(recipe):
        print(f"note: {note}")
    print(f"next: toolkit data {output}, then toolkit plan {output} --gpu NAME (cpu: this machine's memory)")


def _missing(recipe: Recipe) -> Iterator[str]:
    """What the recipe names and this machine does not find, by key."""
    try:
        if (why := model_facts(recipe.model).why_unknown) is not None:
            yield f"model.path: {why}"
    except InputError as error:
        yield from error.problems
    for key in ("train", "eval"):
        path = getattr(recipe.data, key)
        if path is None or Path(path).expanduser().exists():
            continue
        local = looks_local(path) or Path(path).suffix in _FILES
        row = example_row({name: name for name in task_of(recipe.model.task).formats[recipe.data.format].fields})
        missing = f"no such file yet; a row a line, for example {row}"
        yield f"data.{key}: {path}: {missing if local else 'not here; a hub data set?'}"


_FILES = (".jsonl", ".json", ".parquet", ".txt", ".csv")


def _questions(answers: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Key, question and default of each, made as they are asked: a default follows from the answers before it."""
    yield "model", "model (hub id or folder)", "HuggingFaceTB/SmolLM2-135M"
    yield "data", "training data (JSONL, Parquet, folder or hub id)", "data/train.jsonl"
    yield "format", "format of a sample: text, prompt-completion, messages", "text"
    yield "eval", "evaluation: a held-out file, a share of the training data, or none", "0.05"
    yield "lora", "LoRA rank (0: train every weight)", 16
    yield "processes", "processes on this machine, one per GPU", _processes(answers)
    yield "strategy", f"strategy: {', '.join(strategy_names())}", _strategy(answers)
    yield "precision", f"precision: {', '.join(get_args(PrecisionName))}", _precision(answers)
    yield "steps", "optimizer steps", 500


def _ask(answers: dict[str, Any]) -> None:
    import typer

    for key, question, default in _questions(answers):
        if answers[key] is None:
            answers[key] = typer.prompt(question, default=default)


def _processes(answers: dict[str, Any]) -> int:
    return answers["processes"] or max(1, cuda_device_count())


def _rank(answers: dict[str, Any]) -> int:
    return 16 if answers["lora"] is None else int(answers["lora"])


def _strategy(answers: dict[str, Any]) -> str:
    spread = "zero2" if _rank(answers) else "fsdp2"
    return str(answers["strategy"] or ("single" if _processes(answers) == 1 else spread))


def _precision(answers: dict[str, Any]) -> str:
    return str(answers["precision"] or ("bf16" if cuda_device_count() else "fp32"))


def _evaluation(answer: str | None) -> str:
    """The key of ``data`` for an answer: a share, a file, or none."""
    if answer is None or str(answer).strip().lower() in ("", "0", "no", "none", "null"):
        return "eval: null"
    try:
        return f"eval_fraction: {float(answer):g}"
    except ValueError:
        return f"eval: {_text(str(answer))}"


def starter(answers: dict[str, Any]) -> str:
    """The text of a recipe. Answers that are None get a default for this machine."""
    lora, evaluation = _rank(answers), _evaluation(answers["eval"])
    adapter = (
        f"{{method: lora, r: {lora}, alpha: {2 * lora}, dropout: 0.05, target_modules: all-linear}}" if lora else "null"
    )
    lr = "2.0e-4" if lora else "2.0e-5"
    every = ", eval_every: 100" if evaluation != "eval: null" else ""
    lines = [
        (f"model: {{path: {_text(answers['model'] or 'HuggingFaceTB/SmolLM2-135M')}}}", "a hub id or a folder"),
        (f"adapter: {adapter}", "" if lora else "null: every weight trains"),
        (f"data: {{train: {_text(answers['data'] or 'data/train.jsonl')}, {evaluation}, "
         f"format: {answers['format'] or 'text'}, max_length: 1024}}",
         "" if every else "eval: a held-out file; or eval_fraction: 0.05"),
        ("batch: {micro_size: 2, accumulation: 4}", "per process"),
        (f"optimizer: {{lr: {lr}, weight_decay: 0.0, max_grad_norm: 1.0}}", ""),
        ("schedule: {name: cosine, warmup_ratio: 0.03}", ""),
        (f"precision: {_precision(answers)}", " | ".join(get_args(PrecisionName))),
        ("activation_checkpointing: none", "none | selective | full: less memory, more time"),
        (f"strategy: {{name: {_strategy(answers)}}}", " | ".join(strategy_names())),
        (f"machine: {{device: auto, processes: {_processes(answers)}}}", ""),
        (f"run: {{max_steps: {answers['steps'] or 500}, output_dir: runs/first, save_every: 100{every}}}", ""),
    ]  # fmt: skip
    return json_schema.COMMENT + "".join(f"{line:<40}  # {about}\n" if about else f"{line}\n" for line, about in lines)


def _text(value: str) -> str:
    """A YAML scalar; quoted where plain text would mean something else."""
    plain = all(c.isalnum() or c in "/._-" for c in value) and not value.startswith("-")
    return value if plain else "'" + value.replace("'", "''") + "'"
