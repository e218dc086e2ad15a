"""Converts files to files: read the meaning, reject or write, and lint the result."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from toolkit.errors import InputError, RunFailed
from toolkit.linting.context import LintContext
from toolkit.linting.engine import check, contexts
from toolkit.linting.files.load import Loaded, load, read_sources
from toolkit.linting.files.tools import BY_ID
from toolkit.linting.output.machine import envelope
from toolkit.migration import from_deepspeed, from_fsdp, stages, write
from toolkit.migration.meaning import Meaning

TARGETS = ("zero1", "zero2", "zero3", "fsdp2")
_ELSEWHERE = ("deepspeed", "deepspeed_config")  # arguments that name the old strategy's file


@dataclass
class Migrated:
    """The new files by name, and notes on what is written differently in them. ``started``: seconds since the epoch."""

    source: str
    target: str
    files: dict[str, str]
    notes: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.time)
    exit_code = 0

    def to_json(self) -> dict[str, Any]:
        """The result as `toolkit migrate --json` writes it."""
        return envelope("migrate", self.started) | {
            "from": self.source,
            "to": self.target,
            "files": self.files,
            "notes": self.notes,
        }


def migrate(files: list[str], to: str) -> Migrated:
    """Convert the files to another strategy.

    Raises InputError if the files cannot be read, RunFailed with every reason if a setting has no equivalent.
    """
    if to not in TARGETS:
        raise InputError(f"--to {to}: expected one of {', '.join(TARGETS)}")
    loaded = load(files)
    if loaded.unread:
        raise InputError(*loaded.unread)
    groups = contexts(loaded)
    if len(groups) > 1:
        raise InputError("migrate takes at most one file of each kind")
    context = groups[0]
    if context.tool.tool:
        raise InputError(f"{context.tool.path} is a file of {BY_ID[context.tool.tool].name}: it cannot be converted")
    if loaded.missing:
        place, name = loaded.missing[0]
        raise InputError(f"{place}: {name} does not exist, but its settings must be converted")
    meaning = _read(context)
    if meaning.source == to:
        raise InputError(f"these files already use {to}")
    if meaning.source.startswith("zero") and to.startswith("zero"):
        raise InputError(*stages.what_changes(context, meaning.source, to))
    _batch(meaning, context)
    config = write.fsdp2(meaning) if to == "fsdp2" else write.deepspeed(meaning, int(to[-1]))
    if meaning.refused:
        raise RunFailed(
            "\n".join([f"{meaning.source} cannot become {to}:", *(f"  {reason}" for reason in meaning.refused)])
        )
    if "num_processes" not in config:
        meaning.note("num_processes", "not in the files: give it to accelerate launch")
    made = write.texts(config, meaning.arguments)
    _must_be_clean(made)
    return Migrated(meaning.source, to, made, meaning.notes)


def _read(context: LintContext) -> Meaning:
    meaning = Meaning("")
    if context.trainer_fsdp:
        raise InputError("FSDP is set in the training arguments: move it to an accelerate config first")
    for key, entry in context.accelerate.section("").items():
        if key not in ("deepspeed_config", "fsdp_config", "parallelism_config"):
            meaning.top[key] = entry.node.plain()
            if key not in write.KEPT and entry.node.plain() not in (None, {}, []):
                meaning.refuse(str(context.accelerate.place(entry.start)), f"{key} cannot be converted")
    for key, entry in context.args.section("").items():
        if key in _ELSEWHERE:
            meaning.note(
                str(context.args.place(entry.start)), f"{key} is dropped: the accelerate config sets the strategy"
            )
        else:
            meaning.arguments[key] = entry.node.plain()
    if context.uses == "deepspeed":
        from_deepspeed.read(context, meaning)
    elif context.uses == "fsdp" and "accelerate" in context.kinds:
        from_fsdp.read(context, meaning)
    else:
        raise InputError("neither a DeepSpeed nor an FSDP configuration: there is no strategy to convert")
    asked = next((name for name in ("bf16", "fp16") if meaning.arguments.get(name) is True), None)
    if asked is not None and meaning.precision != asked:
        if meaning.precision != "no":
            meaning.refuse("mixed_precision", f"{meaning.precision}, but the training arguments say {asked}")
        meaning.precision = asked  # the Trainer's flag resolves the "auto" of the DeepSpeed config
    return meaning


def _batch(meaning: Meaning, context: LintContext) -> None:
    """Derive the micro-batch or the accumulation from a global batch size."""
    total = meaning.top.pop("train_batch_size", None)
    if total is None:
        return
    micro, steps = (meaning.arguments.get(k) for k in ("per_device_train_batch_size", "gradient_accumulation_steps"))
    processes = context.processes.value if context.processes else None
    if processes and micro and not steps and total % (micro * processes) == 0:
        meaning.arguments["gradient_accumulation_steps"] = total // (micro * processes)
    elif processes and not micro and total % ((steps or 1) * processes) == 0:
        meaning.arguments["per_device_train_batch_size"] = total // ((steps or 1) * processes)
    elif not (processes and micro and steps and micro * steps * processes == total):
        meaning.refuse(
            "train_batch_size",
            f"{total} cannot be split: it must equal num_processes x micro-batch x accumulation",
        )


def _must_be_clean(made: dict[str, str]) -> None:
    sources = [source for name, text in made.items() for source in read_sources(name, text)]
    # num_processes may be given at launch: a DeepSpeed JSON has none.
    bad = [f for f in check(Loaded(sources), ignore=("AC110",)).findings if f.severity != "note"]
    if bad:
        raise RunFailed(
            "\n".join(
                [
                    "the result would not pass toolkit lint:",
                    *(f"  {f.code} {f.place}: {f.message}" for f in bad),
                ]
            )
        )
