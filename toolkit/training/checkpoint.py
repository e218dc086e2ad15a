"""Checkpoints: every rank's pieces of the trained tensors, by name, so that any strategy can resume them on any number
of processes.

A folder is written under a temporary name, sealed with a manifest, then renamed: it is complete or does not exist.
Dropout and data order are functions of the step, so no random state is saved.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from toolkit.errors import InputError
from toolkit.launch.identity import check_recipe, identity
from toolkit.model.processor import pad_token_name
from toolkit.model.running_statistics import statistics
from toolkit.recipe.earlier import recipe_version
from toolkit.results import versions
from toolkit.strategies.engines.base import Engine
from toolkit.strategies.engines.pieces import Saved, Shape, whole
from toolkit.training.agreement import all_written, every_rank_sees, first_problem, from_rank, name_of_mark
from toolkit.training.early_stopping import Improvement
from toolkit.training.finding import all_checkpoints, first_valid, keep_some, whole_manifest
from toolkit.training.loop import Progress
from toolkit.training.manifest import Damaged
from toolkit.training.saving import Background
from toolkit.training.sealing import Ending, Part, join_parts, note_part, seal, wait_for_folder
from toolkit.training.session import Session
from toolkit.training.tensor_folder import SCHEMA, Index, TensorReader, TensorWriter, read_index


class Saving:
    """A checkpoint in progress: every rank is writing its part to disk, and rank 0 seals it."""

    def __init__(self, target: Path, writing: Path, background: Background, part: PartDone, ending: Ending) -> None:
        self.target, self._writing, self._background = target, writing, background
        self._part, self._ending = part, ending

    def settle(self, session: Session) -> Path:
        """Wait until it is complete and renamed; every rank calls it.

        Raises RunFailed on every rank if it cannot be written; earlier checkpoints are intact.
        """
        self._part.wait()
        all_written(session, self._background.problem, self.target, self._give_up)
        all_written(session, self._background.finish(), self.target, self._give_up)
        return self.target

    def _give_up(self) -> None:
        self._ending.failed.set()
        self._background.finish()
        shutil.rmtree(self._writing, ignore_errors=True)

    def finish(self) -> str | None:
        """Wait for this rank's part, and on rank 0 for the others'; returns the error, if any."""
        self._ending.closing.set()
        return self._background.finish()


PartDone = threading.Event
"""Set when this rank's files are complete, or cannot be written."""


def save(session: Session, folder: Path, progress: Progress, eval_loss: float | None = None) -> Path:
    """Write ``folder/step-N`` and wait for it: see ``begin`` and ``Saving.settle``."""
    return begin(session, folder, progress, eval_loss).settle(session)


def begin(
    session: Session,
    folder: Path,
    progress: Progress,
    eval_loss: float | None = None,
    failed: Callable[[], None] | None = None,
    score: dict[str, Any] | None = None,
) -> Saving:
    """Give this rank's pieces of every trained tensor to its disk, as part of ``folder/step-N``; every rank calls it.

    Returns when the last piece is handed over: weights may change from then on. A rank holds no more copies than its
    pieces, and at most four files of 1 GiB: weights and moments that are collected, one file that waits and one that is
    written. Nothing is gathered, unless a rank does not see the folder, on a disk of another node: then rank 0 collects
    each tensor whole and writes them all.

    ``eval_loss``, ``score``: of these weights, where they were evaluated; the best checkpoint is kept. ``failed`` is
    called, by a thread of a rank that cannot write. Raises RunFailed on every rank where the folder cannot be made.
    """
    engine, rank, world = session.engine, session.accelerator.process_index, session.accelerator.num_processes
    target = folder / f"step-{progress.step:08d}"
    writing = folder / f".{target.name}.writing"
    part, done, ending = Part(), PartDone(), Ending()
    background = Background(partial(_report, done, failed))
    if session.shared_disk is None:
        _look_for_the_folder(session, writing, target, background)
    elif rank == 0:
        background.now(_make_anew, writing)
    all_written(session, background.problem, target, background.finish)
    alone = not session.shared_disk
    if not alone:
        background.now(wait_for_folder, writing)
    pieces = partial(Engine.pieces, engine) if alone else engine.pieces
    weights, moments = (
        TensorWriter(writing, f"{kind}-{rank:05d}", background, part.files) for kind in ("weights", "moments")
    )
    beside: dict[str, Shape] = {}
    """Weights that options keep, and running statistics, which are beside the moments."""
    try:
        for name, shape in engine.shapes.items():
            mine = pieces(name)
            weights.add(name, shape, mine.weight)
            for key, moment in mine.moments.items():
                moments.add(f"{name}.{key}", mine.shapes[key], moment)
            if mine.step is not None:
                part.steps[name] = mine.step
        for option, shadow in session.shadows.items():
            with shadow.swapped():
                for name, shape in engine.shapes.items():
                    moments.add(f"{name}.{option}", shape, pieces(name).weight)
                    beside[f"{name}.{option}"] = shape
        for name, value in engine.statistics().items() if rank == 0 else ():
            beside[name] = tuple(value.shape)
            moments.add(name, beside[name], [(whole(beside[name]), value)])
        extra = engine.extra_state()
    except BaseException:
        background.finish()
        raise
    weights.flush()
    moments.flush()
    if rank == 0 or not alone:
        background(note_part, writing, rank, (weights, moments), part)
    background(done.set)
    if rank == 0:
        recipe = session.resolved.recipe.model_dump(mode="json")
        manifest = {
            "schema": SCHEMA,
            "step": progress.step,
            "updates": progress.updates,
            "recent": list(progress.recent),
            "extensions": list(progress.extensions),
            "improvement": progress.improvement.to_json(),
            "eval_loss": eval_loss,
            **({} if score is None else {"score": score}),
            "recipe_version": recipe_version(),
            "identity": identity(recipe),
            "strategy": session.resolved.recipe.strategy.name,
            "world_size": session.resolved.world_size,
            "versions": versions(),
            "label_names": session.label_names,
            "pad_token": pad_token_name(session.tokenizer),
            "rows": session.rows,
            "folders": session.folders,
            "extra": extra,
        }
        keys = {name: engine.moment_keys(name) for name in engine.shapes}
        writers = 1 if alone else world
        background(_seal, writing, target, recipe, manifest, writers, ending, dict(engine.shapes), keys, beside)
        background(keep_some, folder, session.resolved.recipe.run.keep)
    return Saving(target, writing, background, done, ending)


def _report(done: PartDone, failed: Callable[[], None] | None) -> None:
    done.set()
    if failed is not None:
        failed()


def _look_for_the_folder(session: Session, writing: Path, target: Path, background: Background) -> None:
    """Make the folder, and find whether every rank sees it; every rank calls it, once in a run."""
    mark = writing / name_of_mark(session)
    main = session.accelerator.is_main_process
    if main:
        background.now(_make_anew, writing)
        background.now(mark.touch)
    all_written(session, background.problem, target, background.finish)
    session.shared_disk = every_rank_sees(session, mark)
    if main:
        background.now(mark.unlink)


def _make_anew(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _seal(writing: Path, target: Path, recipe: Any, manifest: Any, world: int, ending: Ending, *trained: Any) -> None:
    seal(writing, target, recipe, manifest, join_parts(writing, world, ending), *trained)


@dataclass(frozen=True)
class Loaded:
    """``path`` and ``progress`` of the checkpoint that was loaded; without one None and the start. ``touched``: the
    weights are no longer those of the session's beginning."""

    path: Path | None
    progress: Progress
    touched: bool


def load_newest(session: Session, folder: Path, say: Any) -> Loaded:
    """Load the latest valid checkpoint of a run; every rank calls it, with a folder that all read or have a copy of.

    Invalid ones are reported and skipped, also those whose damage shows only when a part of them has been loaded.
    """
    touched = False

    def loaded(candidate: Path) -> Progress:
        nonlocal touched
        contents = _checked_by_all(session, candidate)
        touched = True
        return _load(session, candidate, *contents)

    candidates = [path.name for path in reversed(all_checkpoints(folder))]
    names: list[str] = from_rank(session, 0, candidates)
    found = first_valid((folder / name for name in names), say, loaded)
    return Loaded(*found, touched) if found else Loaded(None, Progress(), touched)


def load(session: Session, folder: Path) -> Progress:
    """Load weights, moments and progress from a checkpoint; every rank calls it, and reads what it holds, once: each
    block of a file is validated when it is read.

    Raises Damaged on every rank where one has read something else than was written; weights are anything then. Raises
    InputError if the recipe cannot resume it. `check_length` compares the run's length.
    """
    return _load(session, folder, *_checked_by_all(session, folder))


def _load(session: Session, folder: Path, manifest: dict[str, Any], *indexes: Index) -> Progress:
    engine = session.engine
    damages: list[str] = []
    # A rank that finds damage continues to read: others wait for it in collectives.
    weights, moments = (TensorReader(folder, index, manifest["files"], damages.append) for index in indexes)
    check_recipe(folder, manifest, session.resolved.recipe, session.resolved.source)
    for name, shape in engine.shapes.items():
        if name not in weights:
            raise InputError(f"{folder}: recipe mismatch: it has no tensor {name}")
        if weights.index[name].shape != shape:
            raise InputError(f"{folder}: recipe mismatch: {name}: {weights.index[name].shape}, the model has {shape}")
    for name in statistics(engine.running):
        if name not in moments:
            raise InputError(f"{folder}: recipe mismatch: it has no running statistic {name}")
    for option, shadow in session.shadows.items():
        # Before the weights: loading sets what a forward uses, too.
        with shadow.swapped():
            for name in engine.shapes:
                saved = partial(moments.get, f"{name}.{option}")
                engine.load_pieces(name, Saved(None, saved, partial(_moment, moments, name)))
    for name in engine.shapes:
        step = manifest["optimizer_steps"].get(name)
        engine.load_pieces(name, Saved(step, partial(weights.get, name), partial(_moment, moments, name)))
    engine.load_statistics(moments.get)
    engine.load_extra_state(manifest["extra"])
    _agree(session, damages[0] if damages else None)
    # Keys that earlier versions did not write.
    extensions, improvement = list(manifest.get("extensions", [])), Improvement(**manifest.get("improvement", {}))
    return Progress(manifest["step"], manifest["updates"], list(manifest["recent"]), improvement, extensions)


def _moment(moments: TensorReader, name: str, key: str, piece: Any) -> torch.Tensor:
    return moments.get(f"{name}.{key}", piece)


def _checked_by_all(session: Session, folder: Path) -> tuple[dict[str, Any], Index, Index]:
    """Manifest and both indexes of a checkpoint; raises Damaged on every rank where one of them finds a file that is
    missing, has another size, or is not what was written, as far as it is not validated when it is read."""
    problem: str | None = None
    manifest: dict[str, Any] = {}
    indexes: tuple[Index, Index] = {}, {}
    try:
        rank, world = session.accelerator.process_index, session.accelerator.num_processes
        manifest = whole_manifest(folder, (rank, world), when_read=True)
        indexes = read_index(folder, manifest)
    except Damaged as error:
        problem = str(error)
    _agree(session, problem)
    return manifest, *indexes


def _agree(session: Session, problem: str | None) -> None:
    """Raise Damaged on every rank where one of them has a problem; every rank calls it."""
    if (found := first_problem(session, problem)) is not None:
        rank, why = found
        raise Damaged(f"rank {rank}: {why}" if rank else why)
