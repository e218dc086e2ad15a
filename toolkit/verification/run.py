"""`toolkit verify`: a recipe to its cases, the cases through the workers, the findings to a verdict."""

from __future__ import annotations

import contextlib
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.errors import InputError, RunFailed, ToolkitError, first_line
from toolkit.launch.group import WorkerGroup
from toolkit.launch.job import check_machine
from toolkit.layouts import Layout, layout_named
from toolkit.machine import cpu_count
from toolkit.optimizers import with_optimizer
from toolkit.recipe.load import recipe_from, source_of
from toolkit.recipe.preflight import check_known
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.rooms import active_options
from toolkit.strategies import resolve
from toolkit.terminal import Say
from toolkit.threads import torch_threads
from toolkit.verification.cases.case import Case, PassName
from toolkit.verification.cases.conversations import data_case
from toolkit.verification.cases.prepare import (
    avoid_overflow,
    clip_between,
    clip_by_trial,
    exercise_clipping,
    make_case,
    twin_recipe,
    without_gpu_kernels,
)
from toolkit.verification.diagnose.find import diagnose
from toolkit.verification.faults import fault_class
from toolkit.verification.outcome import Outcome
from toolkit.verification.passes import Pass, run_pass

TIME_LIMIT = 300.0
"""Seconds for one pass; a rank that does not answer by then hangs."""

COMPILING_LIMIT = 1200.0
"""The same where blocks are compiled: a rank compiles in the middle of a step, and the others wait for it."""


def resolve_recipe(recipe: str | Path | Recipe, overrides: Sequence[str]) -> Resolved:
    """The recipe, able to run here; raises InputError."""
    resolved = resolve(recipe_from(recipe, overrides), source_of(recipe))
    check_machine(without_gpu_kernels(resolved)[0])
    check_known(resolved)
    return resolved


def with_needs(resolved: Resolved, needs: dict[str, Any]) -> Resolved:
    """The recipe with the sections that a fault cannot do without merged over it; without options that cannot be with
    them."""
    if not needs:
        return resolved
    values = resolved.recipe.model_dump(mode="json")
    if name := needs.get("optimizer", {}).get("name"):
        values["optimizer"] = with_optimizer(values["optimizer"], name)
    axes = {axis for axis in needs.get("strategy", {}).get("mesh") or () if layout_named(axis)}
    no_options = needs.get("options", {}) is None
    needs = {key: value for key, value in needs.items() if key != "options" or not no_options}
    merge(values, needs)
    merged = Recipe.model_validate(values)
    for option, settings in active_options(resolved.recipe):
        if not isinstance(option, Layout) and (
            no_options or not axes <= option.axes or option.refusals(settings, merged)
        ):
            option.remove(values)
    merge(values, needs)  # which may ask for one of them itself
    return resolve(Recipe.model_validate(values), resolved.source, device=resolved.device)


def merge(values: dict[str, Any], over: dict[str, Any]) -> None:
    """Set what ``over`` says in ``values``, section by section."""
    for key, value in over.items():
        # A config that names its kind is a whole model: of another one's nothing stays.
        another = key == "config" and isinstance(value, dict) and "model_type" in value
        if isinstance(value, dict) and isinstance(values.get(key), dict) and not another:
            merge(values[key], value)
        else:
            values[key] = value


def verify(
    resolved: Resolved,
    *,
    group: WorkerGroup | None = None,
    fresh: WorkerGroup | None = None,
    fault: str | None = None,
    mutation: dict[str, Any] | None = None,
    full_size: bool = False,
    time_limit: float = TIME_LIMIT,
    passes: Sequence[PassName] = ("logic", "precision"),
    round_trip: bool = True,
    stop_early: bool = False,
    folder: Path | None = None,
    log: Path | None = None,
    doing: Say | None = None,
) -> Outcome:
    """Verify a resolved recipe. ``group``: a process group of its size to use again, else one is started, whose
    output goes to ``log``. ``fresh``: another, which loads what was saved; with a group given, that one by default.

    ``passes``: which of them to run; a recipe in fp32 has no precision pass, and its logic pass runs. ``round_trip``:
    whether the run is saved, loaded and exported. ``stop_early``: leave out the precision pass where the logic pass has
    found a difference. ``doing`` is told each stage as it ends. Raises InputError for what cannot be used, RunFailed
    where the model fails by itself or a fault that was to be injected never came to pass.
    """
    if fault is not None:
        kind = fault_class(fault)
        if resolved.recipe.strategy.name not in (able := kind.strategies.names()):
            raise InputError(f"--fault: {fault} applies to {', '.join(able)}, not to this strategy")
        resolved = with_needs(resolved, kind.needs_of(resolved))
    asked = resolved
    resolved, notes = without_gpu_kernels(resolved)
    values = twin_recipe(resolved, full_size=full_size)
    names: Sequence[PassName] = ("logic",) if resolved.recipe.precision == "fp32" else passes
    if resolved.recipe.compile:
        time_limit = max(time_limit, COMPILING_LIMIT)
    threads = max(1, cpu_count() // resolved.world_size)
    started = []
    if group is None:
        started = [WorkerGroup(resolved.world_size, threads, log=log) for _ in range(2)]
        group, fresh = started
    reached = False
    outcome: Outcome | None = None
    try:
        for name in names:
            tell = doing or (lambda text: None)
            tell(f"{name} pass: a small model of the recipe")
            # A small model gains nothing by more threads; on a busy machine two took 17 s, one 0.8 (gpt_oss).
            as_a_rank = contextlib.nullcontext() if full_size else torch_threads(group.threads)
            with tempfile.TemporaryDirectory(prefix="toolkit-verify-") as temporary, as_a_rank:
                case = make_case(values, resolved, name, Path(temporary))
                case = _tried(case)
                case = replace(case, fault=fault, mutation=mutation, round_trip=round_trip)
                outcome = outcome or Outcome(asked, case.resolved(), notes=notes)
                data = data_case(resolved, fault) if name == "logic" else None
                found = run_pass(case, group, fresh or group, time_limit, data, tell)
                for choose in (clip_between, clip_by_trial):
                    if (other := _clipping_otherwise(case, found, choose)) is not None:
                        case = other
                        found = run_pass(case, group, fresh or group, time_limit, data, tell)
                if folder is not None:
                    _keep_logs(case.folder, folder, name)
            outcome.notes += [note for note in _notes(found) if note not in outcome.notes]
            reached = reached or found.fault_reached
            outcome.passes.append(found)
            if outcome.diagnosis is None and (found.different or found.unproven):
                outcome.diagnosis = diagnose(found, case)
            if found.failure or found.not_engaged or (stop_early and found.different):
                break
    finally:
        for one in started:
            one.close()
    assert outcome is not None
    if fault is not None and not reached:
        raise RunFailed(
            f"--fault {fault}: this recipe never runs the code that the fault breaks, so nothing was tested"
        )
    return outcome


def _tried(case: Case) -> Case:
    """With the clipping limit and loss scale that the plain loop's norms suggest. It is the first to run the model."""
    try:
        return avoid_overflow(exercise_clipping(case))
    except ToolkitError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise RunFailed(
            f"the model fails in the plain loop, before any strategy: {type(error).__name__}: {first_line(error)} "
            f"({frame.filename}, line {frame.lineno}: {frame.line})"
        ) from error


def _clipping_otherwise(case: Case, found: Pass, choose: Callable[[Case, Sequence[float]], Case]) -> Case | None:
    """With a limit that is chosen from this run's own norms, where all or none of its steps clipped and nothing else is
    amiss.

    An update by signs (Lion; Adam's first) leaves the plain loop's path where a gradient is a rounding error, and its
    norms with it; a second run differs from the first only where its clipping does. An update by the gradient itself
    (SGD) makes other steps with another limit, which the plain loop shows.
    """
    if found.failure or found.different or [claim.id for claim in found.unproven] != ["clipping"]:
        return None
    norms = [step.norm for step in found.ranks[0].run.steps if step.step != case.overflow_step]
    folder = case.folder / "again"
    folder.mkdir()
    return replace(choose(case, norms), folder=folder)


def _notes(found: Pass) -> list[str]:
    """What the recipe asks for that is not the full batch's training, which the plain loop then is not either."""
    if (reference := found.reference) is None:
        return []
    plain = reference.options.values()
    return [note for option in plain for note in option.notes(reference.loop.model, reference.resolved)]


def _keep_logs(case_folder: Path, folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for log in case_folder.glob("rank*.log"):
        (folder / f"{name}-{log.name}").write_bytes(log.read_bytes())
