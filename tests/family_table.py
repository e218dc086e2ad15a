"""Every model family under four strategies, fully and with LoRA, verified, as a table of docs/measurements.

``python -m tests.families docs/measurements/families.md`` writes it; with ``--types causal-lm`` the same for every
model type that the installed transformers has for a task, by its own config made small. Each cell is `toolkit verify`
of a tiny model, in float32 (``--precision bf16``: in both). A line of JSON for each cell goes to OUT.jsonl; a second
run measures only what is not in it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import model_types
from families import EVERY_FAMILY, HYBRIDS
from media import IMAGE_CLASSIFIERS, RESNET, SEEING, WHISPER
from tiny import recipe_dict
from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.recipe.preflight import check_known
from toolkit.recipe.schema import Recipe
from toolkit.results import versions
from toolkit.strategies import resolve
from toolkit.tasks import task_of
from toolkit.verification.run import verify

STRATEGIES = ("ddp", "zero2", "zero3", "fsdp2")
ADAPTERS: dict[str, dict[str, Any] | None] = {"full": None, "LoRA": {"method": "lora", "r": 2, "alpha": 8}}
TIME_LIMIT = 120.0
"""Seconds of a pass, which takes two; long, as other work may have the machine."""
_ON_EXPERTS = {"options": {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}}
_WITH_EXPERTS = ("qwen3_moe", "gpt_oss", "deepseek_v3", "granitemoe")
_SCANS = ("mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h")
"""PEFT refuses LoRA on their out_proj, whose weights a fused kernel reads past the layer."""
_TEXT = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt2", "gpt_neox", "falcon", "olmo3",
    "glm4", "t5",
)  # fmt: skip
_ENCODERS = ("bert", "roberta", "electra", "distilbert", "modernbert")
_ROUTING = ("mixtral", "granitemoe", "gpt_oss", "deepseek_v3", "qwen3_moe", "olmoe")


@dataclass(frozen=True)
class Row:
    """One row of the table: a model, the samples that it takes, and which of its weights get adapters."""

    group: str
    name: str
    model: dict[str, Any]
    data: dict[str, Any]
    adapter: dict[str, Any] | None = None
    """Keys of the adapter that this row sets."""
    full: bool = True
    """Whether training all weights is in this row."""
    why_not: str | None = None
    """Why there is no model to measure."""
    strategies: tuple[str, ...] = STRATEGIES


def rows() -> Iterator[Row]:
    """By kind of model, in the order of the page."""
    formats = {"seq2seq-lm": {"format": "prompt-completion"}}
    for name, model in EVERY_FAMILY.items():
        group = "encoder" if name in _ENCODERS else "text"
        if name in (*_TEXT, *_ENCODERS):
            yield Row(group, name, model, formats.get(model.get("task", ""), {}))
    for name in _ROUTING:
        yield Row("experts", name, EVERY_FAMILY[name], {})
    for name in _WITH_EXPERTS:
        yield Row("experts", f"{name}, adapters on experts", EVERY_FAMILY[name], {}, _ON_EXPERTS, full=False)
    for name, model in {"lfm2": EVERY_FAMILY["lfm2"], **HYBRIDS}.items():
        attends = [] if name in ("mamba", "mamba2") else ["q_proj", "v_proj"]
        targets = {"target_modules": ["in_proj", *attends]} if name in _SCANS else None
        yield Row("state space or linear attention", name, model, {}, targets)
    for name, config in SEEING.items():
        data = {"format": "messages", "max_length": 64}
        yield Row("image and text", name, {"config": config, "task": "image-text-to-text"}, data)
    yield Row("speech", "whisper", {"config": WHISPER, "task": "speech-seq2seq"}, {"format": "audio"})
    for name, config in {**IMAGE_CLASSIFIERS, "resnet": RESNET}.items():
        model = {"config": config, "task": "image-classification", "num_labels": 3}
        yield Row("images", name, model, {"format": "image"})


_DATA: dict[str, dict[str, Any]] = {
    "seq2seq-lm": {"format": "prompt-completion"},
    "image-text-to-text": {"format": "messages", "max_length": 64},
    "speech-seq2seq": {"format": "audio"},
    "image-classification": {"format": "image"},
    "token-classification": {"format": "tokens"},
}


def type_rows(task: str) -> Iterator[Row]:
    """Every model type that transformers has for a task. One of which no small config can be made is a row without
    cells."""
    auto_class = task_of(task).auto_class
    for kind in model_types.types_of(auto_class):
        config, why = model_types.small_config(kind, auto_class)
        model = {"task": task, "config": config} | ({"num_labels": 3} if task_of(task).classes else {})
        model |= {"attention": "eager"} if why is None and not model_types.has_sdpa(config, auto_class) else {}
        targets = {"target_modules": ["in_proj"]} if kind in _SCANS else None
        name = kind if task == "causal-lm" else f"{kind}, {task}"
        yield Row(task, name, model, _DATA.get(task, {}), targets, why_not=why, strategies=("single", *STRATEGIES))


def cells(row: Row) -> Iterator[tuple[str, str]]:
    """(strategy, what trains)."""
    for trained in ADAPTERS:
        if row.why_not is None and not (trained == "full" and not row.full):
            yield from ((strategy, trained) for strategy in row.strategies)


def measure(row: Row, strategy: str, trained: str, precision: str, group: WorkerGroup) -> dict[str, Any]:
    """Verify one cell: ``verdict`` (equivalent, different, not-exercised, refused, crashed) and ``why`` it is not
    equivalent. ``group``: of one process for single, which also goes through a checkpoint and an export."""
    adapter = ADAPTERS[trained]
    if adapter is not None and row.adapter:
        adapter = adapter | row.adapter
    sections = {
        "model": row.model,
        "data": row.data,
        "adapter": adapter,
        "strategy": {"name": strategy},
        "precision": precision,
        "machine": {"processes": 1 if strategy == "single" else 2},
    }
    started = time.perf_counter()
    try:
        resolved = resolve(Recipe.model_validate(recipe_dict(Path("nowhere"), **sections)), "recipe", device="cpu")
        check_known(resolved)  # as every command does
        outcome = verify(resolved, group=group, time_limit=TIME_LIMIT, round_trip=strategy == "single")
    except InputError as error:
        return {"verdict": "refused", "why": str(error).splitlines()[0].removeprefix("recipe: ")}
    except Exception as error:  # a model's own code may fail anywhere; the table says so
        first = (str(error).strip().splitlines() or [""])[0]
        return {"verdict": "crashed", "why": f"{type(error).__name__}: {first}"}
    found: dict[str, Any] = {"verdict": outcome.verdict, "seconds": round(time.perf_counter() - started, 1)}
    if outcome.verdict != "equivalent":
        found["why"] = outcome.failure or "; ".join(f"{one.claim}: {one.seen}" for one in outcome.unproven)
        if outcome.difference is not None:
            one, stage, worst = outcome.difference
            found["why"] = f"{one.name} pass, {stage.name}, {worst.tensor}: {worst.sentence}"
    return found


def page(every: Sequence[Row], results: dict[tuple[str, str, str], dict[str, Any]], head: str) -> str:
    """The page in Markdown. Cells with the same reason share a note."""
    columns = [(strategy, trained) for trained in ADAPTERS for strategy in every[0].strategies]
    heads = [f"{strategy} {trained}" for strategy, trained in columns]
    notes: dict[str, int] = {}
    lines: list[str] = []
    group = ""
    without = [f"{row.name} ({row.why_not})" for row in every if row.why_not is not None]
    missing = [row.name for row in every if row.why_not is None and not any(n == row.name for n, *_ in results)]
    for row in every:
        if row.name in missing or row.why_not is not None:
            continue
        if row.group != group:
            group = row.group
            lines += [f"\n## {group.capitalize()}\n", f"| | {' | '.join(heads)} |", f"| --- |{' --- |' * len(heads)}"]
        texts = [_cell_text(results.get((row.name, *column)), notes) for column in columns]
        lines.append(f"| {row.name.removesuffix(f', {row.group}')} | {' | '.join(texts)} |")
    cells_in_all = sum(len(list(cells(row))) for row in every)
    counts: dict[str, int] = {}
    for one in results.values():
        counts[one["verdict"]] = counts.get(one["verdict"], 0) + 1
    packages = ("torch", "transformers", "peft", "deepspeed", "accelerate")
    text = head.format(
        date=datetime.date.today().isoformat(),
        versions=", ".join(f"{name} {versions()[name]}" for name in packages),
        types=len(every),
        counts=", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())),
        measured=f"{len(results)} of {cells_in_all} cells are measured"
        + ("" if len(results) == cells_in_all else "; an empty cell is not"),
    )
    text += "\n".join(lines) + "\n"
    if missing:
        text += f"\n## Not measured yet\n\n{', '.join(missing)}.\n"
    if without:
        text += f"\n## No small model\n\n{'; '.join(without)}.\n"
    if notes:
        text += "\n## Reasons\n\n" + "\n".join(f'{at}. <a id="{at}"></a>{why}' for why, at in notes.items()) + "\n"
    return text


def _cell_text(one: dict[str, Any] | None, notes: dict[str, int]) -> str:
    if one is None:
        return ""
    if one["verdict"] == "equivalent":
        return "equivalent"
    at = notes.setdefault(one["why"].replace("|", "\\|"), len(notes) + 1)
    return f"{one['verdict']} [{at}](#{at})"


_HEAD = """\
# Model families

Model families under four strategies, all weights (*full*) and with LoRA, each compared with the plain loop by
[`toolkit verify`](../verify.md): two processes on a CPU over gloo, tiny models with random weights, in float32, without
the round trip through a checkpoint. *refused*: an error before training, with the reason below.
[Random recipes](fuzz.md) verify the other options of a recipe, [PEFT methods](peft-methods.md) the other adapters.

{measured}: {counts}.

Measured up to {date} with {versions};
written by `python -m tests.families docs/measurements/families.md`.
"""


_TYPES_HEAD = """\
# Every model type of transformers

{types} model types that the installed transformers has for these tasks, each by the defaults of its own config class
made small by what their keys are called: under five strategies, all weights (*full*) and with LoRA, compared with the
plain loop by [`toolkit verify`](../verify.md), in float32: `single` in one process, with the round trip (saved,
resumed, exported, and the export loaded by transformers and PEFT alone), the others in two processes on a CPU over
gloo, without it. *refused*: an error before training, with the reason below. Of tasks other than causal-lm, ddp, zero3
and fsdp2 with LoRA and fsdp2 with all weights come first.

{measured}: {counts}.

Measured up to {date} with {versions};
written by `make weekly-families`.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is not measured yet, and write the page; exit status 1 if a cell is neither equivalent nor
    refused."""
    parser = argparse.ArgumentParser(prog="python -m tests.families", description=__doc__)
    parser.add_argument("output", type=Path, metavar="OUT.md")
    parser.add_argument("--precision", default="fp32", help="bf16: verify in float32 and in bf16")
    parser.add_argument("--only", nargs="*", default=[], help="names of rows")
    parser.add_argument("--group", nargs="*", default=[], help="headings of the page")
    parser.add_argument("--types", nargs="*", metavar="TASK", help="every model type that transformers has for these")
    parser.add_argument("--cells", nargs="*", default=[], metavar="CELL", help="as fsdp2:LoRA; others are not measured")
    parser.add_argument("--again", nargs="*", default=[], metavar="VERDICT", help="measure cells with these once more")
    asked = parser.parse_args(arguments)
    every = list(rows()) if asked.types is None else [row for task in asked.types for row in type_rows(task)]
    file = asked.output.with_suffix(".jsonl")
    results = {key: one for key, one in _read(file).items() if one["verdict"] not in asked.again}
    _measure_all(
        [
            row
            for row in every
            if (not asked.only or row.name in asked.only) and (not asked.group or row.group in asked.group)
        ],
        results,
        file,
        asked.precision,
        asked.cells,
    )
    known = {(row.name, *cell) for row in every for cell in cells(row)}
    results = {key: one for key, one in results.items() if key in known}
    head = _HEAD if asked.types is None else _TYPES_HEAD
    asked.output.write_text(page(every, results, head), encoding="utf-8")
    return int(any(one["verdict"] not in ("equivalent", "refused") for one in results.values()))


def _measure_all(
    chosen: Sequence[Row],
    results: dict[tuple[str, str, str], dict[str, Any]],
    file: Path,
    precision: str,
    only: Sequence[str] = (),
) -> None:
    import torch

    from toolkit.model.silence import silence_libraries

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)
    silence_libraries()
    file.parent.mkdir(parents=True, exist_ok=True)
    log = Path("build", file.with_suffix(".log").name).absolute()
    log.parent.mkdir(exist_ok=True)
    with WorkerGroup(2, log=log) as group, WorkerGroup(1, log=log.with_suffix(".single.log")) as lone:
        for at, row in enumerate(chosen):
            if at and at % 8 == 0:  # started again at the next cell: long-lived processes do not give all memory back
                group.close()
                lone.close()
            for strategy, trained in cells(row):
                key = (row.name, strategy, trained)
                if key in results or (only and f"{strategy}:{trained}" not in only):
                    continue
                results[key] = measure(row, strategy, trained, precision, lone if strategy == "single" else group)
                if "why" in results[key]:
                    results[key]["why"] = re.sub(r"/\S*?/site-packages/", "", results[key]["why"])
                line = {"family": row.name, "strategy": strategy, "trained": trained, "precision": precision,
                        **results[key]}  # fmt: skip
                with file.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(line) + "\n")
                print(" ".join(str(value) for value in line.values()), flush=True)


def _read(file: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    """What is measured already; a last line that was cut off is not. The last line about a cell counts."""
    results: dict[tuple[str, str, str], dict[str, Any]] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            one = json.loads(line)
        except ValueError:
            continue
        results[one.pop("family"), one.pop("strategy"), one.pop("trained")] = one
    return results
