"""What `toolkit record` and `toolkit prove` print."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit.verification import screen

if TYPE_CHECKING:
    from toolkit.verification.scripts.command import Recorded
    from toolkit.verification.scripts.prove import Proven
    from toolkit.verification.scripts.verify import ModelOutcome


def recorded(found: Recorded) -> list[str]:
    """What was recorded, and the next command."""
    kept = [model for model in found.models if model["recorded"]]
    names = ", ".join(f"{model['class']} ({model['trained']} tensors train)" for model in kept)
    first = found.document["after"] + 1
    return [
        f"recorded  {names} · steps {first} to {first + found.document['steps'] - 1}",
        *(f"not seen  {note}" for note in found.document["not_seen"]),
        f"next: toolkit verify --trace {found.folder}",
    ]


def proven(found: Proven, folder: str | None) -> list[str]:
    """A table and a verdict for each model."""
    lines = []
    for model in found.models:
        lines += _model(model, found, folder)
    own = {note for model in found.models for note in model.outcome.notes}
    lines += [f"not seen  {note}" for note in found.document["not_seen"] if note not in own]
    return lines


def _model(model: ModelOutcome, found: Proven, folder: str | None) -> list[str]:
    facts, outcome = model.facts, model.outcome
    ranks = f"{facts.world} processes" if facts.world > 1 else "1 process"
    precision = facts.copy or facts.autocast or "/".join(facts.computed)
    loss = {"cross-entropy": "cross-entropy", "other": "loss of its own"}[model.loss]
    lines = [
        f"verify  {model.kind} · {facts.strategy} · {ranks} · {precision} · {facts.optimizer} · {loss} · "
        f"{len(facts.steps)} recorded steps",
        *(f"NOT SEEN  {claim.claim}: {claim.seen}; expected {claim.expected}" for claim in outcome.unproven),
        *(f"note: {note}" for note in outcome.notes),
    ]
    closing = screen.ending(outcome, found.document["seconds"], f"--trace {folder or 'DIR'}")
    closing = [line for line in closing if not line.startswith("next: toolkit train")]
    if folder is None:
        closing = [line for line in closing if not line.startswith("next: ")]
    return [*lines, *screen.table(outcome.passes), *closing]
