"""One rank of one job from its recipe on: the toolkit's own session, loop and whole tensors, on a device that is
pretended."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from rehearsal import device, fake, groups
from rehearsal.cells import Cell
from rehearsal.chunks import made_when_asked
from rehearsal.known import Known
from rehearsal.plants import planted
from rehearsal.watch import Counts, Report, Watch
from toolkit.data.loader import TrainLoader, eval_batches, open_data
from toolkit.errors import InputError
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve
from toolkit.strategies.engines.base import Engine
from toolkit.strategies.engines.pieces import Saved
from toolkit.strategies.layouts.tensor.engine import Layers
from toolkit.training import checkpoint, loop
from toolkit.training.guard import LossGuard
from toolkit.training.loop import Progress
from toolkit.training.metrics import MetricsLog, Pending
from toolkit.training.session import Session, open_session
from toolkit.training.stop import Stop

_OF_THIS_PROCESS: list[int] = []
"""Local rank of each job so far."""
_RANK_KEYS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@dataclass
class Outcome:
    """What a rehearsal showed. ``error``: the traceback of what ended it; ``refused``: the toolkit's own reason."""

    reports: Counter[Report] = field(default_factory=Counter)
    counts: dict[str, Counts] = field(default_factory=dict)
    groups: list[tuple[int, str]] = field(default_factory=list)
    claims: list[tuple[str, str, bool]] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    local: dict[str, tuple[tuple[int, ...], str, str]] = field(default_factory=dict)
    """Shape here, dtype and device of every parameter."""
    accelerate: list[Any] = field(default_factory=list)
    """What accelerate's state says that it does."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Of this process, to start and for a step: mostly Python, since nothing is computed."""
    planted: dict[str, Counter[Report]] = field(default_factory=dict)
    """What each planted defect was reported as."""
    refused: str | None = None
    error: str | None = None


def rehearse(cell: Cell, root: str) -> Outcome:
    """Train two steps, evaluate, save and load whole tensors, train one more step; as in a process of its own."""
    return _one(cell, root, _all)


def brief(cell: Cell, root: str) -> Outcome:
    """Start and take two steps."""
    return _one(cell, root, _steps)


def with_defects(cell: Cell, root: str) -> Outcome:
    """``brief``, with every defect of ``plants.py`` in each micro-batch."""
    return _one(cell, root, lambda *args: _steps(*args, plant=True))


def in_turn(cells: list[Cell], root: str) -> list[Outcome]:
    """Several jobs in one process, whose group stays: as `bench`, `verify` and the tests run them."""
    forget()
    device.set_current(0)
    try:
        return [_one(cell, root, _steps, alone=False) for cell in cells]
    finally:
        forget()


def _one(cell: Cell, root: str, what: Callable[..., None], alone: bool = True) -> Outcome:
    outcome = Outcome()
    with as_rank(cell.rank, cell.world, alone), watching(outcome) as watch:
        try:
            what(cell, root, watch, outcome)
        except InputError as error:
            outcome.refused = str(error)
        except Exception:
            outcome.error = traceback.format_exc()
    return outcome


@contextlib.contextmanager
def watching(outcome: Outcome) -> Iterator[Watch]:
    """Inside, tensors are fake and every operator is seen."""
    watch = Watch(Known())
    before = len(groups.made)
    with fake.mode(), watch:
        yield watch
    outcome.reports, outcome.counts = watch.reports, watch.counts
    outcome.groups = groups.made[before:]


@contextlib.contextmanager
def as_rank(rank: int, world: int, alone: bool) -> Iterator[None]:
    """The environment of one process of a launched job; ``single`` is not launched."""
    local = rank % device.COUNT
    _OF_THIS_PROCESS.append(local)
    assert set(_OF_THIS_PROCESS) == {local}, f"torch remembers the first device of a process: {_OF_THIS_PROCESS}"
    given = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": min(world, device.COUNT)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577", "TOOLKIT_SHARED_GROUP": "1"}
    for key in _RANK_KEYS:
        os.environ.pop(key, None)
    if world > 1:
        os.environ |= {key: str(value) for key, value in given.items()}
    if alone:
        forget()
        device.set_current(0)  # as every process begins
    try:
        yield
    finally:
        if alone:
            forget()


def forget() -> None:
    """Leave nothing of a job to the next: what a process of its own would begin with."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.pop("ACCELERATE_USE_CPU", None)
    if dist.is_initialized():
        dist.destroy_process_group()
    _forget_tensors()
    if (known := sys.modules.get("deepspeed.utils.groups")) is not None:
        # DeepSpeed keeps its groups for the process, also when torch's are gone.
        for name in [name for name, value in vars(known).items() if _is_group(name, value)]:
            setattr(known, name, None)
        sys.modules["deepspeed.comm.comm"].cdb = None  # type: ignore[attr-defined]


def _forget_tensors() -> None:
    """DTensor keeps shapes and plans by mesh, for the one rank that a process is; meshes of two ranks are equal. The
    tables of 8-bit AdamW are copied to a device once in a process."""
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    from toolkit.optim import adamw8bit

    adamw8bit._tensors.cache_clear()
    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()


def _is_group(name: str, value: Any) -> bool:
    return name.startswith("_") and isinstance(value, dist.ProcessGroup)


@contextlib.contextmanager
def _claims_of_one_rank() -> Iterator[None]:
    """Inside, nothing is claimed of the values of other ranks: here they are this one's."""
    with (
        mock.patch.object(Engine, "_copy_claims", return_value=[]),
        mock.patch.object(Layers, "_layer_claims", return_value=[]),
    ):
        yield


def _start(cell: Cell, root: str, watch: Watch, outcome: Outcome) -> Session:
    resolved = resolve(Recipe.model_validate(cell.recipe(root)), "recipe.yaml", device="cuda")
    with _claims_of_one_rank(), made_when_asked():
        session = open_session(resolved)
    engine, state = session.engine, session.accelerator.state
    outcome.claims = [(claim.claim, claim.seen, claim.ok) for claim in session.claims]
    outcome.local = {name: _here(p) for name, p in engine.model.named_parameters()}
    plugin = getattr(state, "fsdp_plugin", None)
    outcome.accelerate = [str(state.distributed_type), str(state.mixed_precision), state.deepspeed_plugin is not None,
                          plugin and (plugin.fsdp_version, str(plugin.mixed_precision_policy))]  # fmt: skip
    return session


class _Loop:
    """The toolkit's loop over the toolkit's loader, from where it left off."""

    def __init__(self, session: Session, watch: Watch, outcome: Outcome) -> None:
        resolved = session.resolved
        samples = open_data(resolved.recipe, "train", session.tokenizer)
        self._windows = TrainLoader.of(resolved, samples, session.rank)
        self._session, self._watch, self._outcome = session, watch, outcome
        self.progress, self._recorder = Progress(), MetricsLog(None, loop.sum_over_ranks)
        self._guard = LossGuard(resolved.recipe.run, [])

    def train(self, until: int) -> None:
        self._watch.stage = "step"
        loop.train(self._session, self._windows, until, self.progress, self._after, stop=Stop(), guard=self._guard)

    def _after(self, pending: Pending) -> None:
        self._watch.stage = "after"
        self._recorder.add(pending)
        self._outcome.losses += [record.loss for record in self._recorder.flush()]
        self._outcome.skipped.append(pending.skipped)
        self._watch.stage = "step"


def _steps(cell: Cell, root: str, watch: Watch, outcome: Outcome, plant: bool = False) -> None:
    begun = time.process_time()
    session = _start(cell, root, watch, outcome)
    outcome.seconds["start"] = time.process_time() - begun
    training = _Loop(session, watch, outcome)
    begun = time.process_time()
    with planted(watch, outcome.planted) if plant else contextlib.nullcontext():
        training.train(2)
    outcome.seconds["step"] = (time.process_time() - begun) / 2


def _all(cell: Cell, root: str, watch: Watch, outcome: Outcome) -> None:
    session = _start(cell, root, watch, outcome)
    resolved, training = session.resolved, _Loop(session, watch, outcome)
    _read_gradients(session, watch)
    training.train(2)
    watch.stage = "evaluate"
    held_out = open_data(resolved.recipe, "eval", session.tokenizer)
    batches = eval_batches(
        held_out, resolved.recipe, resolved.micro_size, resolved.data_size, session.data_rank, "cuda"
    )
    loop.evaluate(session, islice(batches, 1))
    _save_and_load(session, training.progress, watch)
    training.train(3)


def _here(parameter: torch.Tensor) -> tuple[tuple[int, ...], str, str]:
    local: Any = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    local = getattr(local, "ds_tensor", local)  # ZeRO-3's share of it
    return tuple(local.shape), str(local.dtype), str(local.device)


def _read_gradients(session: Session, watch: Watch) -> None:
    """Before the first optimizer step, every whole gradient is read, as `verify` reads them."""
    engine: Any = session.engine
    step = engine.step

    def reads_first(lr: float) -> Any:
        del engine.step
        watch.stage = "gradients"
        for name, shape in engine.shapes.items():
            gradient = engine.full_gradient(name)
            assert gradient is not None, name
            assert tuple(gradient.shape) == shape, f"{name}: {tuple(gradient.shape)} where {shape} trains"
            assert gradient.device.type == "cpu", name
        watch.stage = "step"
        return step(lr)

    engine.step = reads_first


def _save_and_load(session: Session, progress: Progress, watch: Watch) -> None:
    """Through a checkpoint's files, whose values are zeros. Rank 0 reads a sealed one; no other rank is here to seal
    what the last one writes, which reads its pieces by hand."""
    engine = session.engine
    folder = Path(tempfile.mkdtemp(prefix="rehearsal-"))
    main = session.accelerator.is_main_process
    if not main:
        (folder / f".step-{progress.step:08d}.writing").mkdir()
    session.shared_disk = True  # the other ranks of this node's disk are not here to look
    try:
        watch.stage = "save"
        saved = checkpoint.begin(session, folder, progress)
        target = saved.settle(session)
        watch.stage = "load"
        if main:
            checkpoint.load(session, target)
            return
        for name, shape in engine.shapes.items():
            mine = engine.pieces(name)
            sizes = {None: shape, **mine.shapes}
            dtype = engine.full_weight(name).dtype

            def read(key: str | None, piece: Any, sizes: Any = sizes, dtype: Any = dtype) -> torch.Tensor:
                return torch.zeros(sizes.get(key, sizes[None]) if piece is None else piece.size, dtype=dtype)

            engine.load_pieces(name, Saved(mine.step, partial(read, None), read))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
