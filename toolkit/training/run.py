"""One process of a training run, from its recipe to its last checkpoint."""

from __future__ import annotations

import json
import math
import os
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from toolkit.counts import count
from toolkit.data.loader import TrainLoader, open_data
from toolkit.data.samples import Samples
from toolkit.data.sources import held_out_recipes
from toolkit.errors import OutOfMemory, Stopped, ToolkitError
from toolkit.half_precision import cpu_emulates
from toolkit.launch.identity import folder_prints, other_loss, saved_recipe
from toolkit.launch.relay import take_screen
from toolkit.launch.signals import attempt, handled, name_of
from toolkit.machine import cpu_count
from toolkit.model.adapters import ignored_values
from toolkit.model.compiling import compilation
from toolkit.model.padding import padding_note
from toolkit.no_memory import asked_bytes, is_out_of_memory
from toolkit.recipe.preflight import Check, known_notes
from toolkit.recipe.resolve import Resolved
from toolkit.results import Result
from toolkit.rooms import asked_options
from toolkit.tasks import task_of
from toolkit.tasks.base import Task
from toolkit.training import checkpoint, finding
from toolkit.training.answers import Answers
from toolkit.training.dry_run import dry_run
from toolkit.training.early_stopping import Improvement
from toolkit.training.extension import check_length, total_steps
from toolkit.training.loop import Progress, counted_once, sum_over_ranks, train
from toolkit.training.manifest import read_manifest
from toolkit.training.metrics import MetricsLog, peak_memory_bytes, set_aside, truncate_metrics
from toolkit.training.preflight import preflight
from toolkit.training.room import check_room
from toolkit.training.same_data import check_rows
from toolkit.training.screen import Screen, engaged_line, headline, rate_of, reading
from toolkit.training.session import Session, open_session
from toolkit.training.steps import Steps
from toolkit.training.stop import Stop
from toolkit.training.watch import Beat, Marks, Watch

STOPPED = "stopped.json"
"""This file exists in a run folder while a stopped run can be resumed; the script of a batch system checks it."""


def run(
    resolved: Resolved,
    *,
    resume: bool,
    extend: bool = False,
    changed_data: bool = False,
    screen: TextIO | None,
    connected: Callable[[], None] | None = None,
    stop: Stop | None = None,
    hung: Callable[[str], None] | None = None,
    again: str = "toolkit train RECIPE --resume",
    dry: bool = False,
) -> dict[str, Any]:
    """Train; returns the result (rank 0 also writes it to ``output_dir/result.json``). Every rank calls it.

    ``extend``: resume with another length also where that changes the learning rates. ``changed_data``: also with other
    rows.
    ``connected`` is called once the processes are. ``stop`` listens to signals once there is something to save.
    ``hung`` ends this process when the job hangs. ``again``: the command that resumes this run. ``dry``: end after one
    forward and backward of the longest micro-batch.

    Raises InputError for what the recipe, the data or a checkpoint gets wrong, RunFailed if training fails, OutOfMemory
    where a rank found no memory, Stopped if it was asked to stop and has saved.
    """
    marks = Marks()
    try:
        return _run(resolved, marks, resume, extend, changed_data, screen, connected, stop, hung, again, dry)
    except Exception as error:
        if isinstance(error, ToolkitError) or not is_out_of_memory(error):
            raise
        rank = int(os.environ.get("RANK", "0"))
        raise memory_error(error, marks.beat, rank, torch.device(resolved.device)) from error


def _run(
    resolved: Resolved,
    marks: Marks,
    resume: bool,
    extend: bool,
    changed_data: bool,
    screen: TextIO | None,
    connected: Callable[[], None] | None,
    stop: Stop | None,
    hung: Callable[[str], None] | None,
    again: str,
    dry: bool,
) -> dict[str, Any]:
    result = Result("train")
    recipe = resolved.recipe
    folder = Path(recipe.run.output_dir)
    marks.at(0, "loading the model", untimed=True)
    session = _opened(resolved, folder, dry=dry, resume=resume)
    if connected is not None:
        connected()
    if not dry:
        check_room(session, folder)
    passed_over: list[str] = []
    start, progress = None, Progress()
    if resume:
        marks.at(0, "loading the checkpoint", untimed=True)
        found = checkpoint.load_newest(session, folder / "checkpoints", passed_over.append)
        start, progress = found.path, found.progress
        if start is None and found.touched:  # by a part of a damaged one: begin with the model as it was
            session = _opened(resolved, folder, resume=True)
    main = session.accelerator.is_main_process
    marks.at(0, "reading the data", untimed=True)
    with reading(screen if main else None):
        samples = open_data(session.data_recipe, "train", session.tokenizer)
        recipes = held_out_recipes(session.data_recipe) if recipe.eval_interval else {}
        held_out = {name: open_data(one, "eval", session.tokenizer) for name, one in recipes.items()}
    session.label_names, session.rows = samples.label_names, samples.prints
    session.folders = folder_prints(recipe) if main else {}
    loader = _loader(session, samples, progress.step)
    total = total_steps(recipe.run, loader.steps_per_epoch, resolved.source)
    checks = preflight(session, samples, resumed=start is not None)
    for one in held_out.values():
        preflight(session, one, resumed=start is not None)
    answers = Answers(session)
    if dry:
        return _dry(session, marks, samples, loader, total, checks, result, screen, folder)
    kept = other_rows = loss_note = None
    if start:
        manifest = read_manifest(start, deep=False)
        loss_note = other_loss(saved_recipe(start, manifest), recipe)
        go_on = changed_data or extend
        other_rows = check_rows(manifest, samples, go_on=go_on, source=resolved.source, folder=start)
    # Behind the rows, whose number says how long an epoch was.
    length = _check_length(session, start, loader, progress, extend=extend) if start else None
    if main:
        if resume and start is None:
            kept = set_aside(folder / "metrics.jsonl")
            set_aside(folder / "eval.jsonl")
            set_aside(folder / "samples.jsonl")
        for name in ("metrics.jsonl", "eval.jsonl", "samples.jsonl"):
            truncate_metrics(folder / name, progress.step)
    take_screen(screen if main else None)
    view = Screen(screen if main else None, total, progress.step, rate_of(task_of(recipe.model.task)))
    for damage in passed_over:
        view.say(damage)
    _introduce(view, session, samples, start, resume, progress.improvement, kept)
    if length:
        view.say(length)
    if other_rows:
        view.say(f"note: {other_rows}")
    if loss_note:
        view.say(f"note: {loss_note}")
    if main:
        (folder / STOPPED).unlink(missing_ok=True)
    recorder = MetricsLog(
        folder / "metrics.jsonl" if main else None, lambda tensor: counted_once(sum_over_ranks(tensor), resolved)
    )
    watch = Watch(marks, recipe.run.hang_after, hung) if hung else None
    stop = stop or Stop()
    try:
        place = getattr(samples, "place", None)  # a stream's rows are gone
        steps = Steps(
            session, view, recorder, folder, progress, total, marks, start, stop.give_up, held_out, answers, place
        )
        for line in steps.eval_notes:
            view.say(f"note: {line}")
        if hung:
            stop.listen(handled())
        if watch:
            watch.start()
        try:
            steps.begin()
            train(session, loader, total, progress, steps, stop=stop, guard=steps.guard, marks=marks)
            marks.at(progress.step, "ending", untimed=True)
            steps.finish(stopped=bool(stop.agreed))
        finally:
            steps.close()
        peaks = sum_over_ranks(_on_own_row(peak_memory_bytes(session.engine.device), session)).tolist()
    finally:
        if watch:
            watch.stop()
        view.close()
        recorder.close()
        for tracker in session.accelerator.trackers:
            tracker.finish()
    counted = task_of(recipe.model.task).labels.counted
    answer = result.finish(
        recipe_sha256=resolved.sha256,
        device=_device_name(session),
        final_loss=recorder.last.loss if recorder.last else None,
        steps=progress.step,
        skipped_steps=progress.step - progress.updates,
        tokens=recorder.tokens,
        row_tokens=recorder.row_tokens,
        tokens_per_second=round(recorder.row_tokens / recorder.seconds, 1) if recorder.seconds else None,
        supervised_tokens_per_second=round(recorder.tokens / recorder.seconds, 1) if recorder.seconds else None,
        peak_memory_bytes=[int(peak) for peak in peaks],
        tokenised=_came(samples),
        unread_columns=samples.unread,
        notes=[
            *_notes(session),
            *([loss_note] if loss_note else []),
            *samples.notes,
            *steps.eval_notes,
            *_without_loss(recorder.without_loss, progress.step, counted),
        ],
        preflight=[check.to_json() for check in checks],
        ended_early=progress.improvement.ends(recipe.run.early_stopping),
        frozen=[frozen.to_json() for frozen in session.frozen],
        compile=compilation().to_json() if recipe.compile else None,
        checkpoint=str(steps.saved or start) if steps.saved or start else None,
        eval_loss=steps.eval_loss,
        evaluation=steps.evaluation,
        best_checkpoint=_named(finding.best(folder / "checkpoints")),
    )
    if main:
        (folder / "result.json").write_text(json.dumps(answer, indent=2) + "\n", encoding="utf-8")
        if stop.agreed and progress.step < total:
            note = {"signal": stop.agreed, "step": progress.step, "checkpoint": answer["checkpoint"]}
            (folder / STOPPED).write_text(json.dumps(note) + "\n", encoding="utf-8")
        else:
            for line in _without_loss(recorder.without_loss, progress.step, counted):
                view.say(f"note: {line}")
            view.say(_farewell(answer, folder, task_of(recipe.model.task)))
    _disconnect(session)
    if stop.agreed and progress.step < total:
        raise Stopped(_stopped(stop.agreed, progress.step, answer["checkpoint"], again), stop.agreed)
    return answer


def _opened(resolved: Resolved, folder: Path, *, dry: bool = False, resume: bool = False) -> Session:
    earlier = resume and finding.padded_by_its_tokenizer(folder / "checkpoints")
    return open_session(resolved, own_padding=earlier, **({} if dry else _tracking(resolved, folder)))


def _dry(
    session: Session,
    marks: Marks,
    samples: Samples,
    loader: TrainLoader,
    total: int,
    checks: Sequence[Check],
    result: Result,
    screen: TextIO | None,
    folder: Path,
) -> dict[str, Any]:
    """The end of a dry run; the result is as a run's, of no step."""
    main, resolved = session.accelerator.is_main_process, session.resolved
    take_screen(screen if main else None)
    view = Screen(screen if main else None, total, 0, rate_of(task_of(resolved.recipe.model.task)))
    try:
        _introduce(view, session, samples, None, False, Improvement(), None)
        ended = dry_run(session, loader, marks)
        for line in ended.lines():
            view.say(line)
        view.say(f"{len(checks)} checks of the preflight passed; nothing was updated or written")
    finally:
        view.close()
    answer = result.finish(
        recipe_sha256=resolved.sha256,
        device=_device_name(session),
        dry_run=ended.to_json(),
        final_loss=None,
        steps=0,
        tokens=0,
        row_tokens=0,
        tokens_per_second=None,
        supervised_tokens_per_second=None,
        peak_memory_bytes=ended.peaks,
        unread_columns=samples.unread,
        notes=[*_notes(session), *samples.notes],
        preflight=[check.to_json() for check in checks],
        checkpoint=None,
    )
    if main:
        (folder / "result.json").write_text(json.dumps(answer, indent=2) + "\n", encoding="utf-8")
    _disconnect(session)
    return answer


def _disconnect(session: Session) -> None:
    if dist.is_initialized():
        dist.barrier()  # no rank takes the group away while another still uses it
        session.accelerator.state.destroy_process_group()


def _notes(session: Session) -> list[str]:
    """What was chosen that a user should know of, whatever the data is."""
    padding = padding_note(session.tokenizer)
    return [*session.notes, *known_notes(session.resolved), *([] if padding is None else [padding])]


def _loader(session: Session, samples: Any, start: int) -> TrainLoader:
    return TrainLoader.of(session.resolved, samples, session.rank, start)


def _check_length(
    session: Session, start: Path, loader: TrainLoader, progress: Progress, *, extend: bool
) -> str | None:
    """Call ``check_length``; every rank calls it with the same data."""
    resolved = session.resolved
    saved = saved_recipe(start, read_manifest(start, deep=False))
    return check_length(
        saved,
        resolved.recipe,
        loader.steps_per_epoch,
        progress,
        extend=extend,
        source=resolved.source,
        folder=start,
        rate_factor=resolved.rate_factor,
    )


def _introduce(
    view: Screen,
    session: Session,
    samples: Any,
    start: Path | None,
    resume: bool,
    improvement: Improvement,
    kept: Path | None,
) -> None:
    trained = sum(math.prod(shape) for shape in session.engine.shapes.values())
    view.say(headline(session.resolved, trained, session.weights))
    view.say(engaged_line(session.claims))
    for option, settings in asked_options(session.resolved.recipe):
        for note in option.notes(settings, session.engine.device.type):
            view.say(f"note: {note}")
    if session.engine.device.type == "cpu" and cpu_emulates(dtype := session.resolved.precision.compute):
        view.say(
            f"note: precision: this CPU has no instructions for products of {dtype}, which take many times as "
            "long as float32's; precision: fp32 is faster here"
        )
    processes, cores = session.resolved.recipe.machine.processes, cpu_count()
    if session.engine.device.type == "cpu" and processes > cores:
        few = "1 core" if cores == 1 else f"{cores} cores"
        view.say(
            f"note: machine.processes: {processes} processes share {few} and wait for each other; fewer are faster"
        )
    if session.loaded_whole is not None:
        view.say(f"note: every process loads the whole model, not its part of it: {session.loaded_whole}")
    if unreached := session.unreached:
        some = f"{unreached[0]}{', ...' if len(unreached) > 1 else ''}"
        view.say(f"note: {len(unreached)} weights that the output does not depend on are not trained ({some})")
    for frozen in session.frozen:
        much = f"{frozen.tensors} tensors, {count(frozen.parameters)} parameters"
        view.say(f"note: model.freeze: {frozen.pattern!r} freezes {much}")
    adapter = session.resolved.recipe.adapter
    if adapter is not None and (ignored := ignored_values(adapter)):
        view.say(f"note: {ignored}")
    for note in (*_notes(session), *samples.notes):
        view.say(f"note: {note}")
    if (came := _came(samples)) is not None and came["from"] != "memory":
        how = "tokens read from the cache" if came["from"] == "cache" else "tokenised and written to the cache"
        view.say(f"data: {how}, {came['seconds']:.1f} s")  # result.json has the path, which is long
    if attempt():
        view.say(f"restarted automatically, attempt {attempt() + 1}")
    if start:
        view.say(f"resumed from {start}")
        if improvement.ends(session.resolved.recipe.run.early_stopping):
            view.say(f"{improvement.reason()}: the run had ended; raise patience to continue")
    elif resume:
        earlier = f"; the metrics of the steps before are in {kept}" if kept else ""
        view.say(f"no checkpoint to resume from: starting at step 0{earlier}")


def _came(samples: Any) -> dict[str, Any] | None:
    """Where rank 0's tokens came from, and in how many seconds; None for a stream."""
    if samples.streamed:
        return None
    came = samples.came
    return {"from": came.came, "seconds": round(came.seconds, 3), "path": _named(came.path)}


def _tracking(resolved: Resolved, folder: Path) -> dict[str, Any]:
    trackers = resolved.recipe.run.trackers
    return {"log_with": list(trackers), "project_dir": str(folder)} if trackers else {}


def _on_own_row(value: int, session: Session) -> torch.Tensor:
    rows = torch.zeros(session.resolved.world_size, dtype=torch.float64, device=session.engine.device)
    rows[session.accelerator.process_index] = value
    return rows


def _device_name(session: Session) -> str:
    if session.engine.device.type == "cuda":
        return torch.cuda.get_device_name(session.engine.device)
    return "cpu"


def _named(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _stopped(number: int, step: int, saved: str | None, again: str) -> str:
    text = f"stopped by {name_of(number)} after step {step}"
    if saved is None:
        return f"{text}; nothing was saved" + (" (run.save_every: 0)" if step else "")
    return f"{text}, saved in {saved}\nresume with: {again}"


def _without_loss(steps: int, taken: int, counted: str) -> list[str]:
    """``steps``: without a supervised token, since this process began."""
    text = f"{steps} of {taken} steps had no supervised {counted}: nothing was learned in them"
    return [text] if steps else []


def _farewell(answer: dict[str, Any], folder: Path, task: Task) -> str:
    counted = {"tokens": "supervised tokens"}.get(task.labels.counted, task.labels.counted)
    loss = "" if answer["final_loss"] is None else f" · loss {answer['final_loss']:.4f}"
    rate = "" if answer["tokens_per_second"] is None else f" · {answer['tokens_per_second']:,.0f} {rate_of(task)}"
    text = f"done: {answer['steps']} steps{loss} · {answer['tokens']:,} {counted}{rate} · {answer['seconds']:.0f} s"
    if answer["checkpoint"] is None:
        return f"{text}\nnothing was saved (run.save_every: 0) · metrics in {folder}/metrics.jsonl"
    return f"{text}\nnext: toolkit export {answer['checkpoint']} -o {folder}/export"


_GIB = 2**30


def memory_error(error: BaseException, beat: Beat, rank: int, device: torch.device) -> OutOfMemory:
    """The error of a run that ends because there is no memory: where it was, what it asked for, and what it had taken.
    ``beat``: where the rank was."""
    size = asked_bytes(str(error))
    asked = "" if size is None else f"{size / _GIB:.2f} GiB asked for, "
    place = f"at step {beat.step}, {beat.place}" if beat.step else beat.place
    peak = f"{peak_memory_bytes(device) / _GIB:.2f} GiB at the peak before"
    if device.type == "cuda":
        now, limit = torch.cuda.memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
        taken = f"{now / _GIB:.2f} GiB allocated, {peak}, {limit / _GIB:.1f} GiB on the device"
        return OutOfMemory(f"rank {rank} is out of memory {place}: {asked}{taken}", limit / _GIB)
    page = resource.getpagesize()
    mapped, resident = (int(one) * page for one in Path("/proc/self/statm").read_text(encoding="ascii").split()[:2])
    total = page * os.sysconf("SC_PHYS_PAGES")
    taken = f"{resident / _GIB:.2f} GiB allocated, {peak}, {total / _GIB:.1f} GiB for the process"
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limited := limit != resource.RLIM_INFINITY:
        taken += f"; {mapped / _GIB:.2f} of {limit / _GIB:.2f} GiB of address space are taken (ulimit -v)"
    return OutOfMemory(f"rank {rank} is out of memory {place}: {asked}{taken}", None, limit / _GIB if limited else None)
