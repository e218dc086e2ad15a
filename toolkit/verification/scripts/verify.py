"""`toolkit verify --trace DIR` of a folder that `toolkit record` wrote: every model of it against the plain side."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from toolkit.errors import InputError
from toolkit.strategies.engines.claims import Claim
from toolkit.threads import torch_threads
from toolkit.verification.compare.across import cross_rank
from toolkit.verification.compare.measure import Measure, Stage
from toolkit.verification.compare.noise import relative_error
from toolkit.verification.outcome import Outcome
from toolkit.verification.passes import Pass
from toolkit.verification.record.plain_form import load_plain
from toolkit.verification.scripts import copies, optimizer
from toolkit.verification.scripts.causes import cause_of, gradient_cause, samples_of
from toolkit.verification.scripts.command import FILE
from toolkit.verification.scripts.facts import ScriptFacts, UnitTrace
from toolkit.verification.scripts.kept_model import KeptModel, rebuild
from toolkit.verification.scripts.losses import LossFound, normalisation
from toolkit.verification.scripts.multiplied import infer_multiplied
from toolkit.verification.scripts.recording import spilled_by
from toolkit.verification.scripts.replay import Replay
from toolkit.verification.scripts.replay_device import multiplying, replay_device
from toolkit.verification.scripts.stages import Replayed, forward, gradient, replay_all


@dataclass(frozen=True)
class RecordedRun:
    """In place of a resolved recipe: nothing of a recorded command is derived from one."""

    world_size: int
    device: str
    strategy: str
    sha256: None = None


@dataclass
class ModelOutcome:
    """The verdict on one model of a recorded command."""

    kind: str
    outcome: Outcome
    facts: ScriptFacts
    loss: str

    def to_json(self) -> dict[str, Any]:
        return {
            "class": self.kind,
            "strategy": self.facts.strategy,
            "optimizer": self.facts.optimizer,
            "loss": self.loss,
            **self.outcome.fields(),
        }


def recorded(folder: Path) -> dict[str, Any]:
    """What the folder says of itself; raises InputError."""
    if not (folder / FILE).is_file():
        if (folder / "model.pt").is_file():
            raise InputError(f"--trace: {folder}: by an earlier version of toolkit.Recorder; record the loop again")
        raise InputError(f"--trace: {folder} contains no trace; record one with toolkit record or toolkit.Recorder")
    try:
        document = json.loads((folder / FILE).read_text(encoding="utf-8"))
        if not isinstance(document["recorded"], list) or not isinstance(document["not_seen"], list):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(f"--trace: {folder / FILE}: cannot be read; record the command again") from None
    return document


def verify_recording(
    folder: Path, model: Any = None, copied: Path | None = None, say: Callable[[str], None] | None = None
) -> list[ModelOutcome]:
    """Compare every recorded model.

    ``model``: one of the recorded class, where it is not one of transformers' own. ``copied``: copies of the models,
    from the same run of `prove`; they are unpickled.

    Nothing in ``folder`` is unpickled. Raises InputError where it cannot be read, or not be replayed on this machine.
    """
    recorded(folder)
    units = sorted(
        (one for one in folder.iterdir() if one.is_dir() and one.name.isdigit()), key=lambda one: int(one.name)
    )
    if not units:
        raise InputError(f"--trace: {folder} contains no recorded model; record the command again")
    return [
        verify_unit(unit, model, copied / unit.name if copied is not None else None, len(units), say) for unit in units
    ]


def verify_unit(
    folder: Path, model: Any = None, copy: Path | None = None, models: int = 1, say: Callable[[str], None] | None = None
) -> ModelOutcome:
    """Compare one recorded model of ``models``, which share the chance of a false alarm. ``copy``: of it, where
    transformers cannot build it again. ``say``: is told what is being computed."""
    say = say or (lambda text: None)
    ranks = [load_plain(file, UnitTrace, file.with_suffix(".tensors")) for file in _files(folder)]
    _check(ranks, str(folder))
    facts = ranks[0].facts
    device, note = replay_device([rank.facts for rank in ranks], str(folder))
    kept = load_plain(folder / "model.pt", KeptModel, folder / spilled_by(0))
    built, how = _build(kept, model, copy, str(folder / "model.pt"))
    built = built.to(device)
    first = _first_weights(ranks, built)
    with torch_threads(max(1, facts.threads)), multiplying(facts.float32_products, device):
        replay = Replay(built, ranks, device, str(folder))
        by_hand = replay.infer_averaging()
        replayed = replay_all(replay, models, say)
        after = infer_multiplied(replay, replayed)
        if after is not None:
            replayed = replay_all(replay, models, say)
    run: Any = RecordedRun(facts.world, device.type, facts.strategy)
    loss = normalisation(replay, replayed.contributions)
    outcome = _outcome(run, replay, replayed, loss, first)
    if facts.by_labels and replay.tokens is None:
        outcome.notes.append("the model was called without labels: what the loss should have been is not known")
    outcome.notes += [*filter(None, (note, how, by_hand, after)), *loss.notes, *facts.notes, *facts.unseen]
    if facts.outside:
        names = f"{facts.outside[0]} and {len(facts.outside) - 1} others" if facts.outside[1:] else facts.outside[0]
        outcome.notes.append(f"{names}: the loss reads it without calling the model; its gradient is not seen")
    return ModelOutcome(kept.kind, outcome, facts, loss.kind)


def _build(kept: KeptModel, given: Any, copy: Path | None, source: str) -> tuple[Any, str | None]:
    """The model, and a note where it was not built from its config."""
    try:
        return rebuild(kept, given, source), None
    except InputError as error:
        if given is not None or copy is None:
            raise
        found = copies.read(copy)
        if isinstance(found, str):
            raise InputError(f"{error} ({found})") from None
        why = str(error).removeprefix(f"{source}: ").partition(". Build the model")[0]
        note = (
            f"{kept.kind}: the plain loop runs a copy of the command's own model; its forward is taken as given ({why})"
        )
        return rebuild(kept, found, source), note


def _outcome(run: Any, replay: Replay, replayed: Replayed, loss: LossFound, first: dict[str, float]) -> Outcome:
    ranks = replay.ranks
    traces = [rank.trace for rank in ranks]
    found = Pass("recorded", ranks=traces, why_measured=replayed.measured_because)
    after_forward = forward(ranks, first, replayed)
    after_forward.measures += loss.measures
    stages = gradient(ranks, replayed)
    steps, notes = optimizer.stages(ranks[0])
    found.stages = [_ledger(replay), after_forward, stages, *steps, cross_rank(traces)]
    found.claims = _claims(ranks)
    found.not_engaged = any(not one.ok for one in found.claims if one.id in ("strategy", "processes"))
    outcome = Outcome(run, run, [found], notes=notes)
    different = found.different
    if different is not None and not found.not_engaged:
        stage, measure = different
        if measure.kind in ("micro-batch-weight", "loss-weight"):
            outcome.diagnosis = loss.diagnosis
            # Gradients are compared with those of the losses as they were weighted: theirs is another cause.
            other = None if stages.ok else gradient_cause(replay, replayed, stages)
            outcome.further = [other] if other is not None else []
        else:
            outcome.diagnosis = cause_of(replay, replayed, stage, measure)
    return outcome


def _first_weights(ranks: Sequence[UnitTrace], built: Any) -> dict[str, float]:
    """By trained tensor, how far the first recorded step's is from the rebuilt model's, relative.

    DeepSpeed 0.19.8 makes its float32 masters from the 16-bit copy: a loop of its own starts from those."""
    facts, seen = ranks[0].facts, ranks[0].trace.run.weights
    copied = facts.copy if facts.strategy.startswith("zero") else None
    errors = {}
    for name, weight in built.named_parameters():
        if name in seen:
            begun = weight.detach().cpu()
            begun = begun.to(getattr(torch, copied)) if copied else begun
            begun = begun.to(seen[name].dtype)
            errors[name] = 0.0 if torch.equal(begun, seen[name]) else relative_error(seen[name], begun)
    return errors


def _ledger(replay: Replay) -> Stage:
    """The data is the loop's own. Where its labels say what it learns, no step may have the same sample twice."""
    if replay.tokens is None:
        calls = sum(len(step) for rank in replay.ranks for step in rank.facts.steps)
        return Stage("ledger", summary=f"{calls} calls of the model")
    stage, total = Stage("ledger", detection_limit=1.0), 0
    for step in range(len(replay.tokens)):
        rows = [row for rank in samples_of(replay, step) for row in rank]
        total += len(rows)
        twice = len(rows) - len(set(rows))
        stage.measures.append(Measure("samples-once", step, twice, 0.0, facts={"repeated": twice}))
    stage.summary = f"{total} samples"
    return stage


def _claims(ranks: Sequence[UnitTrace]) -> list[Claim]:
    facts = ranks[0].facts
    claims = []
    if facts.launched is not None:
        kind = "fsdp" if facts.launched == "FSDP" else "zero"
        ok = facts.strategy.startswith(kind)
        claims.append(Claim("strategy", "strategy that was launched", facts.launched, facts.strategy, ok))
    if facts.world > 1:
        seen = "yes" if facts.connected else "no"
        claims.append(Claim("processes", f"{facts.world} processes connected", "yes", seen, facts.connected))
    if facts.unseen:
        claims.append(Claim("calls", "calls of the model recorded", "all", "not all", False))
    return claims


def _files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("rank*.pt"), key=lambda one: (len(one.name), one.name))
    if not files or not (folder / "model.pt").exists():
        raise InputError(f"--trace: {folder} contains no trace; record the command again")
    return files


def _check(ranks: Sequence[UnitTrace], source: str) -> None:
    numbers = [rank.trace.rank for rank in ranks]
    first = ranks[0]
    if numbers != [*range(len(ranks))] or first.facts.world != len(ranks):
        raise InputError(f"--trace: {source}: traces of ranks are missing; record the command again")
    steps = len(first.trace.run.steps)
    whole = all(len(rank.trace.run.steps) == len(rank.facts.steps) == steps for rank in ranks)
    named = set(first.trace.trainable) == set(first.trace.run.weights)
    if not steps or not whole or not named:
        raise InputError(f"--trace: {source}: has no complete steps; record the command again")
    if not any(first.facts.steps):
        raise InputError(f"--trace: {source}: no call of the model has a gradient; nothing can be compared")
