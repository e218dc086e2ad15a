"""Checkpoints: every rank's pieces of the trained tensors, by name, so that any strategy can resume them on any number
of processes.

A folder is written under a temporary name, sealed with a manifest, then renamed: it is complete or does not exist.
Dropout and data order are functions of the step, so no random state is saved.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from toolkit.errors import InputError
from toolkit.model.batch_norm import statistics
from toolkit.recipe.earlier import recipe_version
from toolkit.results import versions
from toolkit.strategies.engines.base import Engine
from toolkit.strategies.engines.pieces import Saved, Shape, whole
from toolkit.training.agreement import all_written, every_rank_sees, first_problem, from_rank, name_of_mark
from toolkit.training.early_stopping import Improvement
from toolkit.training.finding import AVERAGE, all_checkpoints, first_valid, keep_some, whole_manifest
from toolkit.training.identity import check_recipe, identity
from toolkit.training.loop import Progress
from toolkit.training.saving import Background
from toolkit.training.sealing import Ending, Part, join_parts, note_part, seal, wait_for_folder
from toolkit.training.session import Session
from toolkit.training.tensor_folder import SCHEMA, TensorReader, TensorWriter, read_index


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
) -> Saving:
    """Give this rank's pieces of every trained tensor to its disk, as part of ``folder/step-N``; every rank calls it.

    Returns when the last piece is handed over: weights may change from then on. A rank holds no more copies than its
    pieces, and at most four files of 1 GiB: weights and moments that are collected, one file that waits and one that is
    written. Nothing is gathered, unless a rank does not see the folder, on a disk of another node: then rank 0 collects
    each tensor whole and writes them all.

    ``eval_loss``: of these weights, where they were evaluated; the best checkpoint is kept. ``failed`` is called, by
    a thread of a rank that cannot write. Raises RunFailed on every rank where the folder cannot be made.
    """
    engine, rank, world = session.engine, session.accelerator.process_index, session.accelerator.num_processes
    target = folder / f"step-{progress.step:08d}"
    writing = folder / f".{target.name}.writing"
    part, done, ending = Part(), PartDone(), Ending()
    background = Background(partial(_tell, done, failed))
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
    """Averages and running statistics, which stand beside the moments."""
    try:
        for name, shape in engine.shapes.items():
            mine = pieces(name)
            weights.add(name, shape, mine.weight)
            for key, moment in mine.moments.items():
                moments.add(f"{name}.{key}", mine.shapes[key], moment)
            if mine.step is not None:
                part.steps[name] = mine.step
        if session.average is not None:
            with session.average.swapped():
                for name, shape in engine.shapes.items():
                    moments.add(f"{name}.{AVERAGE}", shape, pieces(name).weight)
                    beside[f"{name}.{AVERAGE}"] = shape
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
            "recipe_version": recipe_version(),
            "identity": identity(recipe),
            "strategy": session.resolved.recipe.strategy.name,
            "world_size": session.resolved.world_size,
            "versions": versions(),
            "label_names": session.label_names,
            "extra": extra,
        }
        keys = {name: engine.moment_keys(name) for name in engine.shapes}
        writers = 1 if alone else world
        background(_seal, writing, target, recipe, manifest, writers, ending, dict(engine.shapes), keys, beside)
        background(keep_some, folder, session.resolved.recipe.run.keep)
    return Saving(target, writing, background, done, ending)


def _tell(done: PartDone, failed: Callable[[], None] | None) -> None:
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


def load(session: Session, folder: Path) -> Progress:
    """Load weights, moments and progress from a checkpoint; every rank calls it, and reads what it holds.

    Raises InputError if it is damaged, or if the recipe cannot resume it. `check_length` compares the run's length.
    """
    manifest = _checked_by_all(session, folder)
    weights, moments = (TensorReader(folder, index) for index in read_index(folder, manifest))
    check_recipe(folder, manifest, session.resolved.recipe, session.resolved.source)
    if session.average is not None:
        # Before the weights: loading sets what a forward uses, too.
        with session.average.swapped():
            for name in session.engine.shapes:
                average = partial(moments.get, f"{name}.{AVERAGE}")
                session.engine.load_pieces(name, Saved(None, average, partial(_moment, moments, name)))
    for name, shape in session.engine.shapes.items():
        if name not in weights:
            raise InputError(f"{folder}: recipe mismatch: it has no tensor {name}")
        if weights.index[name].shape != shape:
            raise InputError(f"{folder}: recipe mismatch: {name}: {weights.index[name].shape}, the model has {shape}")
        step = manifest["optimizer_steps"].get(name)
        session.engine.load_pieces(name, Saved(step, partial(weights.get, name), partial(_moment, moments, name)))
    for name in statistics(session.engine.batch_norms):
        if name not in moments:
            raise InputError(f"{folder}: recipe mismatch: it has no running statistic {name}")
    session.engine.load_statistics(moments.get)
    session.engine.load_extra_state(manifest["extra"])
    # Keys that earlier versions did not write.
    extensions, improvement = list(manifest.get("extensions", [])), Improvement(**manifest.get("improvement", {}))
    return Progress(manifest["step"], manifest["updates"], list(manifest["recent"]), improvement, extensions)


def _moment(moments: TensorReader, name: str, key: str, piece: Any) -> torch.Tensor:
    return moments.get(f"{name}.{key}", piece)


def _checked_by_all(session: Session, folder: Path) -> dict[str, Any]:
    """``whole_manifest``, with the files divided over the ranks; raises InputError on every rank."""
    problem, manifest = None, {}
    try:
        rank, world = session.accelerator.process_index, session.accelerator.num_processes
        manifest = whole_manifest(folder, (rank, world))
    except InputError as error:
        problem = str(error)
    if (found := first_problem(session, problem)) is not None:
        rank, why = found
        raise InputError(f"rank {rank}: {why}" if rank else why)
    return manifest


def newest_for(session: Session, folder: Path, tell: Any) -> Path | None:
    """``newest`` of a folder that all ranks read; every rank calls it, and hashes a part of the files."""
    candidates = [path.name for path in reversed(all_checkpoints(folder))]
    names: list[str] = from_rank(session, 0, candidates)
    return first_valid((folder / name for name in names), tell, partial(_checked_by_all, session))
