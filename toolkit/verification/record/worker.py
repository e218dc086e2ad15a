"""The jobs of every rank: train the case with the toolkit's own session and loop, watched, and save; in processes
that never saw it trained, load and resume."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from toolkit.data.loader import TrainLoader
from toolkit.data.samples import MapSamples
from toolkit.errors import RunFailed
from toolkit.model.checkpointing import recomputed_calls, stores_of
from toolkit.model.compiling import compilation
from toolkit.model.head_loss import fused_calls
from toolkit.model.packed_layers import packed_weights
from toolkit.optimizers import optimizer_kind
from toolkit.recipe.resolve import Resolved
from toolkit.rooms import asked_options
from toolkit.strategies.engines.claims import NotActive
from toolkit.strategies.engines.connect import make_accelerator
from toolkit.training import checkpoint, finding, loop
from toolkit.training.loop import Progress
from toolkit.training.metrics import Pending
from toolkit.training.session import Session, engage
from toolkit.verification.cases.case import SAVE_AFTER, Case
from toolkit.verification.cases.samples import expected_windows
from toolkit.verification.faults import find_fault
from toolkit.verification.record.exported import exported_answers
from toolkit.verification.record.trace import RankTrace, load_trace
from toolkit.verification.record.tracer import SessionTracer

# Where a rank is, as the tracer writes it: the last step that was done, and the stage.
_RESUMING, _EXPORTING = (f"{SAVE_AFTER - 1} {what} the checkpoint" for what in ("resuming", "exporting"))


def run_case(case: Case) -> None:
    """Train ``case`` on this rank and leave its RankTrace in ``case.folder``. Every rank calls it."""
    rank = int(os.environ.get("RANK", "0"))
    trace = RankTrace(rank)
    fault = find_fault(case.fault, case.mutation)
    with _quiet(case.folder / f"rank{rank}.log"), fault.injected(case):
        _run(case, trace)
    trace.fault_reached = fault.was_reached()
    trace.save(case.folder)


def _run(case: Case, trace: RankTrace) -> None:
    resolved = case.resolved()
    try:
        session = _open(resolved, case)
    except RunFailed as error:
        trace.failure = str(error)
        trace.claims = error.claims if isinstance(error, NotActive) else []
        return
    trace.claims = session.claims
    trace.trainable = list(session.engine.shapes)
    trace.tied = _tied(session)
    checkpoints = case.folder / "checkpoints"
    progress = Progress()
    recorder = SessionTracer(
        session, progress, case.overflow_step, case.folder / f"rank{trace.rank}.at", case.loss_scale
    )

    averages = optimizer_kind(resolved.recipe.optimizer.name).averages
    evaluating = Counter[str]()

    def after_step(pending: Pending) -> None:
        if averages and pending.step == SAVE_AFTER:
            # Before it is saved, as in training, and not again where it is resumed.
            window = expected_windows(case.samples, resolved, 1)[0]
            before = _calls(session)
            recorder.evaluate([micro for rank, micro in window if rank == session.token_rank])
            evaluating.update(_calls(session))
            evaluating.subtract(before)
        if case.round_trip and pending.step == SAVE_AFTER:
            checkpoint.save(session, checkpoints, progress)

    with recorder.watching() as run:
        trace.run = run
        _train(session, case, progress, after_step)
    trace.forwards = sum(len(step.micros) for step in run.steps)
    trace.fused = fused_calls(session.engine.model) - evaluating["fused"]
    asked = [option for option, _ in asked_options(resolved.recipe) if option.claim and option.seen_by == "calls"]
    trace.options = {option.name: option.calls(session.engine.model) for option in asked}
    if resolved.recipe.compile:
        seen = compilation()
        trace.compiled = replace(seen, calls=seen.calls - evaluating["calls"], runs=seen.runs - evaluating["runs"])
    trace.offloaded = [(s.moved, s.returned, s.bytes_out) for s in stores_of(session.engine.blocks)]
    trace.recomputed = recomputed_calls(session.engine.blocks)
    trace.operators, trace.products = dict(recorder.operators), recorder.products
    trace.inputs = recorder.inputs
    trace.collectives, trace.axes = dict(recorder.collectives), dict(recorder.axes)
    trace.reducing = sorted(recorder.reducing)
    trace.actions, trace.exchanged = recorder.actions, recorder.exchanged
    trace.dtypes = {what: sorted(names) for what, names in recorder.dtypes.items()}
    trace.dtypes |= _parameter_dtypes(session)


def resume_case(case: Case) -> None:
    """After `run_case`, in processes that may be others: a new session, whose weights are the first ones again, takes
    the checkpoint and resumes; what it saw is added to the rank's RankTrace. Every rank calls it."""
    rank = int(os.environ.get("RANK", "0"))
    trace = load_trace(case.folder, rank)
    fault = find_fault(case.fault, case.mutation)
    with _quiet(case.folder / f"rank{rank}.log"), fault.injected(case):
        _resume(case, trace)
    trace.fault_reached = trace.fault_reached or fault.was_reached()
    trace.save(case.folder)


def _resume(case: Case, trace: RankTrace) -> None:
    resolved = case.resolved()
    marker = case.folder / f"rank{trace.rank}.at"
    marker.write_text(_RESUMING, encoding="utf-8")
    session = _open(resolved, case)
    checkpoints = case.folder / "checkpoints"
    newest = finding.newest(checkpoints)
    assert newest is not None
    progress = checkpoint.load(session, newest)
    recorder = SessionTracer(session, progress, case.overflow_step, marker, case.loss_scale)
    with recorder.watching() as trace.resumed:
        _train(session, case, progress, lambda pending: None)
    if trace.rank == 0:
        if case.pass_name == "logic" and resolved.recipe.model.path is None:
            marker.write_text(_EXPORTING, encoding="utf-8")
            trace.exported = exported_answers(resolved, newest, case.samples, case.folder)
        shutil.rmtree(checkpoints)
    _together()


def _open(resolved: Resolved, case: Case) -> Session:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return engage(resolved, make_accelerator(resolved), None, case.samples.pad_id)


def _train(session: Session, case: Case, progress: Progress, after_step: Callable[[Pending], None]) -> None:
    samples = cast(MapSamples, case.samples)  # in place of one
    loader = TrainLoader.of(session.resolved, samples, session.rank, progress.step)
    loop.train(session, loader, case.steps, progress, after_step)


def _calls(session: Session) -> Counter[str]:
    """Of what counts its own calls, in this process so far."""
    seen = compilation()
    return Counter(fused=fused_calls(session.engine.model), calls=seen.calls, runs=seen.runs)


def _tied(session: Session) -> list[list[str]]:
    """Names that share one parameter in the live model; of a stage those in the model before it was cut. That the two
    stages have the same is evidence of the engine."""
    if session.engine.pipeline is not None:
        return session.engine.pipeline.stage.tied
    sharing: dict[int, list[str]] = {}
    for name, parameter in session.accelerator.unwrap_model(session.engine.model).named_parameters(
        remove_duplicate=False
    ):
        sharing.setdefault(id(parameter), []).append(name.replace("_fsdp_wrapped_module.", ""))
    return [sorted(names) for names in sharing.values() if len(names) > 1]


def _parameter_dtypes(session: Session) -> dict[str, list[str]]:
    model = session.engine.model
    packed = packed_weights(model)  # proven by bits, not by a dtype's name
    # What no output depends on keeps the dtype of what trains.
    idle = tuple(session.unreached) or ("\0",)
    frozen = {
        str(p.dtype).removeprefix("torch.")
        for name, p in model.named_parameters()
        if not p.requires_grad and id(p) not in packed and not name.endswith(idle)
    }
    return {"frozen": sorted(frozen)}


def _together() -> None:
    if dist.is_initialized():
        dist.barrier()


@contextlib.contextmanager
def _quiet(log: Path) -> Iterator[None]:
    """What four packages say on every rank goes to the case's log file, C++ included."""
    with log.open("ab") as file:
        saved = os.dup(1), os.dup(2)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            for number, descriptor in enumerate(saved, start=1):
                os.dup2(descriptor, number)
                os.close(descriptor)
