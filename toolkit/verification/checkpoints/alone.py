"""Tensors that one checkpoint has and the other has not."""

from __future__ import annotations

import torch

from toolkit.verification.checkpoints.contents import Checkpoint


def missing(one: Checkpoint, other: Checkpoint, notes: list[str]) -> list[str]:
    """Names of ``one`` that ``other`` lacks and should have.

    Copies of tied weights are not missing, and neither are frozen weights where ``other`` keeps what trains; ``notes``
    is reported of both. Moments that are kept under the name of a copy get the name that both sides have.
    """
    names = sorted(one.weights.keys() - other.weights.keys())
    if other.trained_only and names:
        trained = {name for tensors in one.moments.values() for name in tensors}
        frozen = [name for name in names if name not in trained]
        if frozen:
            why = "do not train" if trained else "may be frozen: no moments say that they train"
            notes.append(
                f"{len(frozen)} tensors are in {one.path} alone, and {why}; {other.path} has trained ones only"
            )
        names = [name for name in names if name in trained]
    kept = []
    for name in names:
        twin = _tied_to(one, name, other)
        if twin is None:
            kept.append(name)
            continue
        notes.append(f"{name} is {twin} under another name (tied); {other.path} has it once")
        for tensors in one.moments.values():
            if name in tensors:
                tensors.setdefault(twin, tensors[name])
                del tensors[name]
    return kept


def _tied_to(one: Checkpoint, name: str, other: Checkpoint) -> str | None:
    """A tensor of both sides with the same shape and bits as ``name``: an embedding and the output layer, tied."""
    stored = one.weights[name]
    if len(stored.shape) != 2:
        return None
    same = (n for n, t in one.weights.items() if n != name and n in other.weights and t.shape == stored.shape)
    return next((twin for twin in same if torch.equal(one.weights[twin].read(), stored.read())), None)
