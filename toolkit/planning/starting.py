"""What a plan is about: a recipe, or one that is made around a model, and which of its values nobody has asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.errors import InputError
from toolkit.planning.hardware import devices
from toolkit.recipe.load import apply_overrides, recipe_from, validate
from toolkit.recipe.model_facts import looks_local, model_facts
from toolkit.recipe.positions import Document, parse, read
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Model, Recipe
from toolkit.recipe.shapes import shape_of
from toolkit.strategies import simplest, strategy_named

if TYPE_CHECKING:
    from toolkit.planning.options import PlanOptions
    from toolkit.planning.scripted import Scripted


@dataclass(frozen=True)
class Start:
    """``notes``: how ``recipe`` differs from what the user has, for the screen. ``any_strategy``, ``any_count``:
    whether the strategy and the number of devices are the plan's own choice. ``hub``: the hub id whose published shape
    is in ``recipe`` in place of its config. ``script``: what ``--script`` has read."""

    recipe: Recipe
    notes: tuple[str, ...] = ()
    any_strategy: bool = False
    any_count: bool = False
    hub: str | None = None
    script: Scripted | None = None


def starting(request: PlanOptions) -> Start:
    """The recipe of the request, or one made around its model. Raises InputError."""
    machine = {"machine.processes": request.gpus, "machine.nodes": request.nodes}
    flags = machine | {
        "data.max_length": request.length,
        "batch.micro_size": request.micro,
        "run.epochs": request.epochs,
    }
    given = [f"{key}={value}" for key, value in flags.items() if value is not None]
    overrides = [*given, *request.overrides]
    methods = {"--lora": request.lora, "--qlora": request.qlora, "--full": request.full or None}
    asked = [flag for flag, value in methods.items() if value is not None]
    if len(asked) > 1:
        raise InputError(f"{' and '.join(asked)}: one of them; each says what is trained")
    if request.script is not None:
        return _of_script(str(request.script), request, overrides, asked)
    if request.recipe is None:
        raise InputError("name a recipe or a model, or a training script: --script train.py")
    if isinstance(request.recipe, Recipe) or str(request.recipe).endswith((".yaml", ".yml")):
        if asked:
            instead = {
                "--lora": "adapter.r=16",
                "--qlora": "adapter.method=qlora adapter.r=16",
                "--full": "adapter=null",
            }
            raise InputError(f"{asked[0]}: for a model; with a recipe use {instead[asked[0]]}")
        overrides, notes = _one_length(overrides, _run_section(request.recipe))
        start = Start(recipe_from(request.recipe, overrides), notes)
    else:
        start = _around_model(str(request.recipe), request, overrides)
    return _over_devices(start, request)


def _run_section(recipe: str | Path | Recipe) -> Any:
    if isinstance(recipe, Recipe):
        return recipe.run.model_dump(exclude_unset=True)
    value = read(recipe).value
    return value.get("run") if isinstance(value, dict) else None


def _one_length(overrides: Sequence[str], run: Any) -> tuple[list[str], tuple[str, ...]]:
    """``overrides``, and a note, where they give the run's length in epochs and ``run``, the section of the recipe, has
    steps, or the other way round: what the command line says counts."""
    given = {key: value for key, _, value in (override.partition("=") for override in overrides)}
    for key, other in (("run.epochs", "run.max_steps"), ("run.max_steps", "run.epochs")):
        has = run.get(other.removeprefix("run.")) if isinstance(run, dict) else None
        if given.get(key, "null") != "null" and other not in given and has is not None:
            return [*overrides, f"{other}=null"], (f"{other}: {has} gives way to {key}={given[key]}",)
    return [*overrides], ()


def _over_devices(start: Start, request: PlanOptions) -> Start:
    """Where the recipe's strategy is for one process and the question is about several devices: with the simplest
    strategy for several, unless the command line sets one, and a note."""
    recipe = start.recipe
    several = (request.gpus or 1) * (request.nodes or 1) > 1
    if (
        not several
        or _sets(request.overrides, r"strategy\b.*")
        or strategy_named(recipe.strategy.name).traits.distributed
    ):
        return start
    name = simplest(lambda strategy: strategy.traits.distributed)
    note = f"{recipe.strategy.name} runs in one process; planned with strategy.name: {name}"
    varied = recipe.model_copy(update={"strategy": recipe.strategy.model_copy(update={"name": name})})
    return replace(start, recipe=varied, notes=(*start.notes, note), any_strategy=True)


def _sets(overrides: Iterable[str], section: str) -> bool:
    return any(re.match(f"{section}=", one) for one in overrides)


def _around_model(name: str, request: PlanOptions, overrides: Sequence[str]) -> Start:
    processes = request.gpus or 1
    model, config, notes, hub = _model(name)
    data: dict[str, Any] = {"train": "data/train.jsonl", "max_length": request.length or 1024}
    if isinstance(config, dict) and config.keys() >= {"text_config", "vision_config"}:
        model["task"], data["format"] = "image-text-to-text", "messages"
    rank = request.lora or request.qlora
    method = "lora" if request.lora else "qlora"
    steps = {"max_steps": 500} if request.tokens is None else {"epochs": 1}
    overrides, of_length = _one_length(overrides, steps)
    values: dict[str, Any] = {
        "model": model,
        "adapter": None if rank is None else {"method": method, "r": rank, "alpha": 2.0 * rank},
        "data": data,
        "batch": {"micro_size": request.micro or 1, "accumulation": max(1, 16 // processes // (request.micro or 1))},
        "precision": "bf16",
        "activation_checkpointing": "full",
        "strategy": {"name": "single" if processes * (request.nodes or 1) == 1 else "zero2"},
        "machine": {
            "device": "cpu" if (request.gpu or "").lower() == "cpu" else "cuda",
            "processes": processes,
            "nodes": request.nodes or 1,
        },
        "run": steps,
    }
    device = devices(request.gpu_table).get((request.gpu or "").lower())
    if device is not None and device.lacks("bfloat16") and not _sets(overrides, "precision"):
        values["precision"] = "fp16"
        notes = (*notes, f"{device.name} computes nothing in bfloat16; planned with precision: fp16")
    document = parse(json.dumps(values), name)
    apply_overrides(document, overrides)
    counted = request.gpus or request.nodes or _sets(request.overrides, r"machine(\.processes|\.nodes)?")
    any_strategy = not _sets(request.overrides, r"strategy(\.name)?")
    return Start(validate(document), (*notes, *of_length), any_strategy, not counted, hub)


def _model(name: str) -> tuple[dict[str, Any], Any, tuple[str, ...], str | None]:
    """The recipe's section ``model`` of a hub id, a folder or a config file, with the config where it is here, notes,
    and the hub id where published sizes stand in for it."""
    source = Path(name).expanduser()
    if source.suffix == ".json":
        config = _read(source)
        return {"config": config}, config, (), None
    if source.is_dir():
        config = _read(source / "config.json") if (source / "config.json").exists() else {}
        return {"path": str(source)}, config, (), None
    if not looks_local(name) and (shape := shape_of(name)) is not None:
        facts = model_facts(Model(path=name))
        if facts.config is None:
            return {"config": shape}, {}, (f"{facts.why_unknown}; planned with the sizes that {name} publishes",), name
    return {"path": name}, {}, (), None


def _of_script(script: str, request: PlanOptions, overrides: Sequence[str], methods: Sequence[str]) -> Start:
    """The recipe of a training script; what the command line says counts in place of what the script says."""
    from toolkit.planning.scripted import left_to_the_script, read_script

    if isinstance(request.recipe, Recipe) or str(request.recipe).endswith((".yaml", ".yml")):
        raise InputError(f"--script {script}: beside a model or alone; {request.recipe} is a recipe")
    processes = (request.gpus or 1) * (request.nodes or 1)
    answers = {override.partition("=")[0] for override in overrides}
    answers |= {"model"} if request.recipe or answers & {"model.path", "model.config"} else set()
    answers |= {"adapter"} if methods else set()
    habits = {habit.partition("=")[0] for habit in request.loop_set}
    scripted = left_to_the_script(read_script(script, answers, habits, processes), answers)
    values = dict(scripted.values)
    named = request.recipe or values["model"].get("path")
    model, _, notes, hub = ({}, {}, (), None) if named is None else _model(str(named))
    values["model"] = {key: value for key, value in values["model"].items() if key != "path"} | model
    if methods:
        rank = request.lora or request.qlora
        method = "lora" if request.lora else "qlora"
        values["adapter"] = None if rank is None else {"method": method, "r": rank, "alpha": 2.0 * rank}
    values["data"] = {"train": "data/train.jsonl"} | values.get("data", {})
    values["machine"] = {
        "device": "cpu" if (request.gpu or "").lower() == "cpu" else "cuda",
        "processes": request.gpus or values.get("machine", {}).get("processes", 1),
        "nodes": request.nodes or 1,
    }
    overrides, of_length = _one_length(overrides, values["run"])
    parsed = parse(json.dumps(values), script)
    document = Document(script, parsed.value, {tuple(said.key.split(".")): said.place for said in scripted.read})
    apply_overrides(document, overrides)
    return Start(validate(document), (*scripted.lines(), *notes, *of_length), hub=hub, script=scripted)


def _read(file: Path) -> Any:
    try:
        return parse(file.read_text(encoding="utf-8"), str(file)).value
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}") from None


_WIDTH = ("hidden", "embd", "embed", "d_model", "dim", "width", "channel")
_DEPTH = ("layer", "depth", "block", "stage")
"""Parts of the names that families have for the width of a block and for the number of blocks."""
_OTHER = ("layer", "head", "inner", "ffn", "act", "drop")
"""... of names that have a part of a width's and are none: ``num_hidden_layers``, ``head_dim``, ``hidden_act``."""


def check_sizes(resolved: Resolved) -> None:
    """Raise InputError for a config that names no width or no number of layers: transformers takes those of the
    config's class, so that the plan would be of another model."""
    config = resolved.facts.config
    if config is None:
        return  # reported when the model is built
    names = [key for key, value in _entries(config) if _is_size(value)]
    widths = [key for key in names if any(part in key for part in _WIDTH) and not any(part in key for part in _OTHER)]
    depths = [key for key in names if any(part in key for part in _DEPTH)]
    for found, what in ((widths, "width (hidden_size)"), (depths, "number of layers (num_hidden_layers)")):
        if not found:
            raise InputError(f"{resolved.source}: model.config: it has no {what}; use the model's own config.json")


def _entries(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _entries(value)
        else:
            yield str(key), value


def _is_size(value: Any) -> bool:
    return isinstance(value, int | list) and not isinstance(value, bool) and bool(value)
