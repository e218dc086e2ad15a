"""A plan of a training script: its settings, read without running it, as a recipe and a loop of ``--loop``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from toolkit.errors import InputError, Place
from toolkit.importing import trainer_parts as trainer
from toolkit.importing import trl
from toolkit.importing.draft import Draft, Written
from toolkit.importing.launching import Launch
from toolkit.importing.precision import checkpoint_dtype
from toolkit.importing.script.model_calls import weights_dtype
from toolkit.importing.script.setting import Settings
from toolkit.importing.script.settings import read_settings
from toolkit.importing.training_arguments import TRAINING_DEFAULTS
from toolkit.importing.write import nested
from toolkit.linting.files.load import load

OPTIONS = {
    "model_name_or_path": ("toolkit plan MODEL --script ...", ("model",)),
    "per_device_train_batch_size": ("--micro N", ("batch.micro_size",)),
    "gradient_accumulation_steps": ("batch.accumulation=N", ("batch.accumulation", "batch.global_size")),
    "max_length": ("--length N", ("data.max_length",)),
    "packing": ("data.packing=true or false", ("data.packing",)),
    "gradient_checkpointing": ("activation_checkpointing=full or none", ("activation_checkpointing",)),
    "activation_checkpointing": ("activation_checkpointing=full or none", ("activation_checkpointing",)),
    "optim": ("optimizer.name=adamw, adamw8bit, lion, sgd or schedule-free", ("optimizer.name",)),
    "bf16": ("precision=bf16, fp16, fp32 or bf16-pure", ("precision",)),
    "fp16": ("precision=bf16, fp16, fp32 or bf16-pure", ("precision",)),
    "dtype": ("precision=bf16, fp16, fp32 or bf16-pure", ("precision",)),
    "attn_implementation": ("model.attention=sdpa, eager or flash_attention_2", ("model.attention",)),
    "trust_remote_code": ("model.trust_remote_code=true or false", ("model.trust_remote_code",)),
    "num_labels": ("model.num_labels=N", ("model.num_labels",)),
    "use_peft": ("--lora R, --qlora R or --full", ("adapter",)),
    "lora_r": ("adapter.r=R", ("adapter.r", "adapter")),
    "lora_alpha": ("adapter.alpha=N", ("adapter.alpha", "adapter")),
    "lora_dropout": ("adapter.dropout=P", ("adapter.dropout", "adapter")),
    "use_dora": ("adapter.method=lora, qlora or dora", ("adapter.method", "adapter")),
    "load_in_4bit": ("adapter.method=lora or qlora", ("adapter.method", "adapter")),
    "load_in_8bit": ("adapter.method=lora or qlora", ("adapter.method", "adapter")),
    "lora_target_modules": ("adapter.target_modules=all-linear", ("adapter.target_modules", "adapter")),
    "lora_modules_to_save": ("adapter.modules_to_save=[...]", ("adapter.modules_to_save", "adapter")),
    "deepspeed": ("strategy.name=zero1, zero2 or zero3", ("strategy.name", "strategy")),
    "fsdp": ("strategy.name=fsdp1 or fsdp2", ("strategy.name", "strategy")),
    "reentrant": ("--loop-set reentrant=true or false", ("reentrant",)),
    "eval_micro": ("--loop-set eval_micro=ROWS, 0 without an evaluation", ("eval_micro",)),
    "eval_kept": ("--loop-set eval_kept=BATCHES", ("eval_kept",)),
    "double_quant": ("--loop-set double_quant=true or false", ("double_quant",)),
}  # fmt: skip
"""For each setting of a script that a plan depends on: the option that gives it, and the keys that this sets."""
_PLANNED = ("model", "adapter", "batch", "strategy", "activation_checkpointing", "precision", "data")
_LORA_DEFAULTS = {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
"""Of PEFT's LoraConfig (0.21)."""


@dataclass(frozen=True)
class Read:
    """One setting of the plan and where the script has it."""

    key: str
    value: Any
    place: Place

    def to_json(self) -> dict[str, Any]:
        return {"key": self.key, "value": self.value, "file": str(self.place.file), "line": self.place.line}


@dataclass(frozen=True)
class Scripted:
    """A script's recipe, as nested values, and its loop. ``read``: what the script says, by line; ``assumed``: what it
    does not say, in words."""

    path: str
    values: dict[str, Any]
    loop: str
    habits: tuple[str, ...]
    read: tuple[Read, ...]
    assumed: tuple[str, ...] = field(default=())

    def lines(self) -> list[str]:
        """What was read and what was assumed, for the screen: a line of the script each."""
        by_place: dict[Place, list[str]] = {}
        for setting in self.read:
            by_place.setdefault(setting.place, []).append(f"{setting.key} {_shown(setting.value)}")
        told = [f"{place}: {', '.join(settings)}" for place, settings in by_place.items()]
        return [*told, *(f"assumed: {text}" for text in self.assumed)]

    def to_json(self) -> dict[str, Any]:
        return {
            "file": self.path,
            "loop": self.loop,
            "habits": list(self.habits),
            "read": [setting.to_json() for setting in self.read],
            "assumed": list(self.assumed),
        }


def read_script(path: str, answers: Collection[str], habits: Collection[str], processes: int) -> Scripted:
    """The recipe and the loop of the script ``path``.

    ``answers``: recipe keys that the command line sets, ``model`` and ``adapter`` where it names the whole. ``habits``:
    keys of ``--loop-set``. ``processes``: of all nodes. Raises InputError with every setting that the text does not
    decide and the command line does not give.
    """
    settings = read_settings(path)
    draft = _draft(settings, answers)
    _check(settings, draft, answers, habits)
    dtypes = {} if "precision" in answers else _dtypes(settings, draft)
    if processes > 1 or "strategy.name" in draft.values:
        draft.values.setdefault("strategy.name", "ddp")
    said = {key: item for key, item in (settings.habits | dtypes).items() if key not in habits}
    if "adapter.method" not in draft.values or draft.values["adapter.method"] != "qlora":
        said = {key: item for key, item in said.items() if key not in ("double_quant", "prepare_for_kbit")}
    if draft.values.get("activation_checkpointing") != "full":
        said.pop("reentrant", None)
    sections = {key: value for key, value in draft.values.items() if key.partition(".")[0] in _PLANNED}
    values = nested(sections)
    values["optimizer"] = _optimizer(draft, settings.loop)
    if draft.values.get("optimizer.name") == "schedule-free":
        values["schedule"] = {"name": "constant"}
    values.setdefault("model", {})["task"] = settings.task
    if "num_labels" in settings.written:
        values["model"]["num_labels"] = settings.written["num_labels"].value
    values["run"] = {key: draft.values[f"run.{key}"] for key in ("max_steps", "epochs") if f"run.{key}" in draft.values}
    pairs = tuple(f"{key}={item.value}" for key, item in said.items() if item.value is not None)
    return Scripted(path, values, settings.loop, pairs, _read(draft, said), _assumed(settings, draft, answers))


def _draft(settings: Settings, answers: Collection[str]) -> Draft:
    """The recipe under construction, by the tables of `toolkit import`."""
    defaults = dict(trl.TRL.defaults if settings.loop == "trl" else TRAINING_DEFAULTS) | _LORA_DEFAULTS
    title = trl.TRL.version if settings.loop == "trl" else "transformers 5.23.0"
    written = {key: item for key, item in settings.written.items() if key not in settings.unread}
    if settings.loop == "trl" and written.get("max_length", Written(0, Place(""))).value is None:
        settings.miss("max_length", written.pop("max_length").place.line, "None: rows are not cut")
    draft = Draft(written, defaults, title)
    draft.answers = {"model.path": "given"} if "model" in answers else {}
    beside = _launch_files(settings, draft)
    trl.the_model(draft)
    trainer.batch(draft)
    if draft.get("max_length") is not None:
        draft.carry("max_length", "data.max_length", draft.whole("max_length"))
    if draft.active("packing"):
        draft.carry("packing", "data.packing", True)
    if beside:
        Launch(draft).read(beside)
    trainer.distribution(draft)
    trainer.length(draft)
    trainer.optimizer(draft)
    trainer.checkpointing(draft)
    return draft


def _launch_files(settings: Settings, draft: Draft) -> list[Any]:
    """The DeepSpeed file that the arguments name, beside the script or in this folder."""
    name = draft.get("deepspeed")
    if isinstance(name, dict):
        settings.miss("deepspeed", settings.written["deepspeed"].place.line, "a dictionary")
    if not isinstance(name, str):
        return []
    for folder in (Path(), Path(settings.script.path).parent):
        if (folder / name).is_file():
            return load([str(folder / name)]).sources
    if name.endswith(".json"):
        settings.miss("deepspeed", settings.written["deepspeed"].place.line, f"{name} is not here")
    return []


def _check(settings: Settings, draft: Draft, answers: Collection[str], habits: Collection[str]) -> None:
    """Raise InputError with everything that a plan depends on and nobody says."""
    given = {*answers, *habits}
    problems = [
        _problem(unread.place, key, unread.reason)
        for key, unread in settings.unread.items()
        if not given.intersection(OPTIONS[key][1])
    ]
    problems += [
        _problem(item.place or Place(settings.script.path), item.key, item.reason)
        for item in draft.keys
        if item.outcome in ("unsupported", "unknown")
        and item.key in OPTIONS
        and item.key not in settings.unread
        and not given.intersection(OPTIONS[item.key][1])
    ]
    if problems:
        raise InputError(*problems)


def _problem(place: Place, key: str, reason: str) -> str:
    return f"{place}: {key}: {reason}; give it: {OPTIONS[key][0]}"


def _dtypes(settings: Settings, draft: Draft) -> dict[str, Written]:
    """Set ``precision`` from the weights' dtype and autocast; the habits that it does not say. Raises InputError."""
    weights = weights_dtype(settings)
    stored = trainer.as_dtype(None if weights is None else weights.value)
    if stored is None:
        stored = checkpoint_dtype(draft) or "bfloat16"
        settings.assume(f"weights in {stored}: transformers 5 loads the checkpoint's dtype")
    default = settings.loop == "trl" and draft.get("bf16") is None and not draft.active("fp16")
    half = "bf16" if default else next((name for name in ("fp16", "bf16") if draft.active(name)), None)
    key = half if half is not None and draft.place(half) is not None else "dtype"
    place = draft.place(key) or (None if weights is None else weights.place) or Place(settings.script.path)
    adapted = "adapter.method" in draft.values
    if half == "fp16" and stored == "float16" and not adapted:
        raise InputError(
            _problem(place, "fp16", "weights that train in float16 have gradients that no GradScaler takes")
        )
    if half is None:
        name = {"float32": "fp32", "bfloat16": "bf16-pure", "float16": "fp16"}[stored]
        draft.carry(key, "precision", name)
        return {"autocast": Written("false", place)} if settings.loop == "bare" or stored == "float16" else {}
    masters = str(draft.values.get("strategy.name", "")).startswith(("zero", "fsdp"))
    pure = stored == "bfloat16" and not adapted and not masters
    draft.carry(key, "precision", "bf16-pure" if pure else half)
    if pure:
        return {"autocast": Written("true", place)}
    packed = draft.values.get("adapter.method") == "qlora"
    return {"float32_base": Written("true", place)} if adapted and stored == "float32" and not packed else {}


def _optimizer(draft: Draft, loop: str) -> dict[str, Any]:
    """Its name and what its state depends on. transformers' «adamw_torch» is torch's own kernel, foreach; other loops
    have it as a habit."""
    named = {
        key: draft.values[f"optimizer.{key}"] for key in ("name", "momentum") if f"optimizer.{key}" in draft.values
    }
    foreach = loop in ("trainer", "trl") and draft.get("optim") in ("adamw_torch", "sgd")
    return named | ({"kernel": "foreach"} if foreach else {})


def _read(draft: Draft, habits: Mapping[str, Written]) -> tuple[Read, ...]:
    carried = [
        Read(name, draft.values[name], item.place)
        for item in draft.keys
        if item.place is not None
        for name in item.recipe
        if name.partition(".")[0] in _PLANNED or name == "optimizer.name"
    ]
    said = [Read(f"--loop-set {key}", item.value, item.place) for key, item in habits.items()]
    return tuple(sorted(carried + said, key=lambda setting: (str(setting.place.file), setting.place.line or 0)))


def _assumed(settings: Settings, draft: Draft, answers: Collection[str]) -> tuple[str, ...]:
    defaults = [
        f"{name} {_shown(draft.values[name])}: the default of {draft.version}"
        for item in draft.keys
        if item.place is None
        for name in item.recipe
        if name in ("batch.micro_size", "batch.accumulation", "optimizer.name", "activation_checkpointing", "adapter.r",
                    "data.max_length", "adapter.target_modules") and name not in answers
    ]  # fmt: skip
    texts: Iterable[str] = [*settings.assumed, *(defaults if settings.loop in ("trainer", "trl") else ())]
    return tuple(dict.fromkeys(texts))


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def left_to_the_script(scripted: Scripted, answers: Collection[str]) -> Scripted:
    """``scripted`` with only what the command line leaves to the script among what was read."""

    def taken(key: str) -> bool:
        return key in answers or key.partition(".")[0] in answers

    return replace(scripted, read=tuple(setting for setting in scripted.read if not taken(setting.key)))
