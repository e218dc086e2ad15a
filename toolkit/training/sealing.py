"""How the ranks' files become one checkpoint: each rank notes what it wrote, rank 0 joins the notes and seals.

The ranks meet in the folder that they write to, so nothing is communicated while training continues beside it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.disk import flush_to_disk
from toolkit.errors import RunFailed
from toolkit.strategies.engines.pieces import Shape
from toolkit.training.manifest import write_manifest
from toolkit.training.tensor_folder import INDEX, Entry, Index, TensorWriter, incomplete

_POLL_S = 0.02
_SEEN_S = 60.0
"""A network file system may tell a node for this long that there is no such folder."""
_PATIENCE_S = 60.0
"""How long an ending run waits for the other ranks' files while none of them grows: a rank may have been killed."""


@dataclass
class Part:
    """What one rank wrote. ``steps``: the optimizer's counts of the parameters that it has state of."""

    files: dict[str, Any] = field(default_factory=dict)
    weights: Index = field(default_factory=dict)
    moments: Index = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"files": self.files, "steps": self.steps, **_index_to_json(self.weights, self.moments)}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Part:
        weights, moments = ({n: Entry.from_json(e) for n, e in found[kind].items()} for kind in ("weights", "moments"))
        return cls(found["files"], weights, moments, found["steps"])

    def join(self, other: Part) -> None:
        """Add what another rank wrote."""
        self.files |= other.files
        for mine, theirs in ((self.weights, other.weights), (self.moments, other.moments)):
            for name, entry in theirs.items():
                mine.setdefault(name, Entry(entry.shape, entry.dtype)).pieces.extend(entry.pieces)
        for name, step in other.steps.items():
            self.steps[name] = max(step, self.steps.get(name, 0))


def _index_to_json(weights: Index, moments: Index) -> dict[str, Any]:
    return {kind: {name: entry.to_json() for name, entry in index.items()}
            for kind, index in (("weights", weights), ("moments", moments))}  # fmt: skip


def _note(folder: Path, rank: int) -> Path:
    return folder / f"part-{rank:05d}.json"


def wait_for_folder(folder: Path) -> None:
    """Wait until this rank sees the folder that rank 0 made; raises RunFailed if it does not appear."""
    until = time.monotonic() + _SEEN_S
    while not folder.is_dir():
        if time.monotonic() > until:
            raise RunFailed("the folder that rank 0 created has not appeared on this node, where earlier ones did")
        time.sleep(_POLL_S)


def note_part(folder: Path, rank: int, writers: tuple[TensorWriter, TensorWriter], part: Part) -> None:
    """Note that this rank's files are complete and flushed; the note appears whole."""
    part.weights, part.moments = (writer.index for writer in writers)
    note = _note(folder, rank)
    writing = note.with_suffix(".writing")
    writing.write_text(json.dumps(part.to_json(), separators=(",", ":")), encoding="utf-8")
    flush_to_disk(writing)
    os.replace(writing, note)


class Ending:
    """Signals that the run ends or that a rank has failed, to the thread of rank 0 that waits for their notes."""

    def __init__(self) -> None:
        self.failed, self.closing = threading.Event(), threading.Event()


def join_parts(folder: Path, world: int, ending: Ending) -> Part:
    """Wait for every rank's note; returns all of them as one and deletes them.

    Raises RunFailed if a rank has failed, or if the run ends and the others no longer write.
    """
    notes = [_note(folder, rank) for rank in range(world)]
    size, since = -1, time.monotonic()
    for rank, note in enumerate(notes):
        while not note.exists():
            if ending.failed.wait(_POLL_S):
                raise RunFailed("another process could not write its part")
            now = _bytes(folder) if ending.closing.is_set() else None
            if now is None or now != size:
                size, since = -1 if now is None else now, time.monotonic()
            elif time.monotonic() - since > _PATIENCE_S:
                raise RunFailed(f"rank {rank} did not complete its part; was its process killed?")
    whole = Part()
    for note in notes:
        whole.join(Part.from_json(json.loads(note.read_text(encoding="utf-8"))))
    for note in notes:
        note.unlink()
    return whole


def _bytes(folder: Path) -> int:
    """Of the files in the folder. One that another rank renames while this one looks counts nothing."""
    total = 0
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def seal(
    writing: Path,
    target: Path,
    recipe: dict[str, Any],
    manifest: dict[str, Any],
    part: Part,
    shapes: dict[str, Shape],
    keys: dict[str, tuple[str, ...]],
    beside: dict[str, Shape],
) -> None:
    """Write index and manifest and give the folder its name. ``keys``: of each parameter's moments. ``beside``: what
    is beside the moments, by name: averages of weights, running statistics.

    Raises RunFailed if a trained tensor is not complete: nothing empty is ever saved.
    """
    names = {f"{name}.{key}": name for name in shapes if name in part.steps for key in keys[name]}
    # A factored moment has a shape of its own.
    moments = [(m, part.moments[m].shape if m in part.moments else shapes[name]) for m, name in names.items()]
    moments += beside.items()
    problem = incomplete(part.weights, shapes.items()) or incomplete(part.moments, moments)
    if problem is not None:
        raise RunFailed(f"{problem}; nothing was saved")
    weights = {name: part.weights[name] for name in shapes}
    kept = {name: part.moments[name] for name, _ in moments}
    index = json.dumps(_index_to_json(weights, kept), separators=(",", ":"))
    (writing / INDEX).write_text(index + "\n", encoding="utf-8")
    (writing / "recipe.json").write_text(json.dumps(recipe, indent=1) + "\n", encoding="utf-8")
    steps = {name: part.steps[name] for name in shapes if name in part.steps}
    write_manifest(writing, manifest | {"optimizer_steps": steps}, part.files)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(writing, target)
    flush_to_disk(target.parent)  # the name too, before an older checkpoint goes
