"""`toolkit plan`: from the command line to the screen, the JSON, the written recipe and the exit status."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.disk import write_text
from toolkit.errors import InputError
from toolkit.planning.allocator import context, nccl, workspaces
from toolkit.planning.hardware import Device, device_named, devices
from toolkit.planning.options import PlanOptions, Request
from toolkit.planning.starting import Start, check_sizes, starting
from toolkit.planning.unneeded import without
from toolkit.recipe.preflight import check_known
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.recipe.yaml_text import dump
from toolkit.results import CommandResult, Result, write_json
from toolkit.rooms import asked_options
from toolkit.strategies import resolve
from toolkit.terminal import working

if TYPE_CHECKING:
    from toolkit.planning.answers import Answers
    from toolkit.planning.candidate import Candidate
    from toolkit.planning.loops import Loop
    from toolkit.planning.search import Search
    from toolkit.planning.time import Rates


QUESTIONS = ("length", "micro", "gpus", "gpu", "model")
"""What ``--fit`` answers; see toolkit/planning/questions.py."""


def plan_command(request: Request) -> int:
    """Plan and print; returns the exit status. 0: the recipe fits. 1: it does not. Raises InputError if the input
    cannot be used."""
    from toolkit.planning.screen import show

    request = _without_recipe(request)
    with working("tracing the model"):
        found = make_plan(request)
    if request.page:
        from toolkit.report.plan_page import plan_page

        page = plan_page(
            found.search, found.candidates, found.chosen, found.change, found.scaled, found.to_json()["assumptions"]
        )
        write_text(request.page, page)
    if request.json_target:
        write_json(found.to_json(), request.json_target)
    if request.json_target != "-":
        for note in found.notes:
            print(f"note: {note}")
        show(found.search, found.candidates, found.chosen, found.change, request, found.scaled, found.answers)
    return found.exit_code


def _without_recipe(request: Request) -> Request:
    """The first word is an override where ``--script`` stands in for a recipe."""
    word = request.recipe
    if request.script is None or not isinstance(word, str) or "=" not in word or Path(word).exists():
        return request
    return replace(request, recipe=None, overrides=(word, *request.overrides))


@dataclass(frozen=True)
class Planned(CommandResult):
    """The result of `toolkit plan`."""

    search: Search
    candidates: list[Candidate]
    """All candidates; the first is the recipe's own."""
    chosen: Candidate | None
    """The fastest that fits; None if nothing fits."""
    change: str | None
    """The smallest change that makes the recipe fit; None if it fits, or if no change is sufficient."""
    scaled: list[dict[str, Any]] | None = None
    answers: Answers | None = None
    notes: tuple[str, ...] = ()
    """What a user should know of the recipe's own values."""

    @property
    def fits(self) -> bool:
        """Whether the recipe itself fits."""
        return self.candidates[0].fits


def make_plan(request: PlanOptions) -> Planned:
    """Predict memory and time; writes the chosen recipe where ``request.output`` says so. Raises InputError."""
    warnings.filterwarnings("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from toolkit.planning.cache import caching, default_folder

    with _nothing_collected() as kept, caching(default_folder() if request.cache else None):
        return _plan(request, kept)


@contextlib.contextmanager
def _nothing_collected() -> Iterator[Callable[[], None]]:
    """No garbage collection while packages are imported, a tenth of a plan's time: what they make stays anyway.
    The word that it gives is for when they are there: what has been made by then is never looked through again."""
    was = gc.isenabled()
    gc.disable()

    def kept() -> None:
        if was:
            gc.freeze()
            gc.enable()

    try:
        yield kept
    finally:
        if was:
            gc.enable()


def _plan(request: PlanOptions, kept: Callable[[], None]) -> Planned:
    result = Result("plan")
    _check(request)
    start = starting(request)
    recipe = start.recipe
    device = _device(request, recipe)
    source = request.source
    asked = resolve(recipe, source, device="cpu" if device.name == "cpu" else "cuda")
    from toolkit.planning.loops import check_loop, loop_named

    loop = _loop_of(request, start)
    check_loop(loop, asked)
    check_sizes(asked)
    notes = check_known(asked)
    if request.tokens is not None and asked.recipe.run.epochs is None:
        raise InputError(
            f"--tokens: the run has max_steps: {asked.recipe.run.max_steps}; say with --epochs how often it reads them"
        )
    from toolkit.planning.choice import choose, other_training, smallest_change, why_chosen
    from toolkit.planning.images import Images
    from toolkit.planning.search import Search
    from toolkit.planning.time import Rates

    rates = Rates.on(device, request.link)
    if request.calibrate:
        from toolkit.planning.calibrate import calibrated

        if asked.base is not None and (reason := asked.base.why_not_here(asked.stored, asked.device)) is not None:
            raise InputError(f"{asked.source}: {reason}; `toolkit plan` without --calibrate does not need it")
        log = Path("runs/plan") / f"{Path(source).stem}.log"
        print(f"calibrating: running a few steps of this model under each strategy; output of the ranks: {log}",
              file=sys.stderr, flush=True)  # fmt: skip
        device, rates = calibrated(asked, device, rates, log)
    with without("bitsandbytes"):
        images = Images.of(asked, request.images, _pixels(request.image_size))
        search = Search(asked, device, request.headroom, rates, loop, images, start)
        kept()
        candidates = search.all(request.every)
        chosen = choose(candidates)
        change = smallest_change(candidates, search)
    if change is None and not candidates[0].fits:
        change = other_training(candidates[0], search)
    scaled = None
    if request.scale:
        from toolkit.planning.scale import on_paper

        scaled = on_paper(search)
    from toolkit.planning.answers import answers

    with without("bitsandbytes"):
        answered = answers(
            search, chosen, request.fit, request.explain, request.price, devices(request.gpu_table), request.tokens
        )
    if request.output and chosen is not None:
        _write_recipe(chosen.resolved, request.output, start.hub)
    document = result.finish(
        recipe_sha256=asked.sha256,
        device=device.name,
        candidates=[candidate.as_json() for candidate in candidates],
        chosen=None if chosen is None else candidates.index(chosen),
        chosen_because=None if chosen is None else why_chosen(candidates, chosen),
        smallest_change=change,
        usable_bytes=search.usable,
        headroom=search.headroom,
        disk_seconds=None if request.disk is None else candidates[0].storage.seconds(request.disk),
        loop=loop,
        assumptions=[
            *_assumptions(asked, device, rates),
            *notes,
            *search.notes(),
            *_of_loop(loop_named(loop), loop),
        ],
        traced_slowly=search.planner.slowly,
        script=None if start.script is None else start.script.to_json(),
        scale=scaled,
        **answered.to_json(),
    )
    code = 0 if candidates[0].fits else 1
    return Planned(document, code, search, candidates, chosen, change, scaled, answered, tuple(notes))


def _check(request: PlanOptions) -> None:
    for name, value in (
        ("--gpus", request.gpus),
        ("--nodes", request.nodes),
        ("--micro", request.micro),
        ("--images", request.images),
        ("--epochs", request.epochs),
        ("--tokens", request.tokens),
    ):
        if value is not None and value < 1:
            raise InputError(f"{name} {value}: must be at least 1")
    for flag, rank in (("--lora", request.lora), ("--qlora", request.qlora)):
        if rank is not None and rank < 1:
            raise InputError(f"{flag} {rank}: the rank of an adapter must be at least 1; omit it to train all weights")
    if request.memory is not None and request.memory <= 0:
        raise InputError(f"--memory {request.memory:g}: GiB per device must be above 0")
    if request.disk is not None and request.disk <= 0:
        raise InputError(f"--disk {request.disk:g}: GB/s of a node's disk must be above 0")
    for question in request.fit:
        if question not in QUESTIONS:
            raise InputError(f"--fit {question}: not one of {', '.join(QUESTIONS)}")
    if request.headroom is not None and not 0 <= request.headroom < 1:
        raise InputError(f"--headroom {request.headroom:g}: a fraction of the memory, from 0 to below 1")
    if (request.gpus or 1) * (request.nodes or 1) > 1024:
        raise InputError(f"--gpus x --nodes: {request.gpus} x {request.nodes}: at most 1024 devices")


def _device(request: PlanOptions, recipe: Recipe) -> Device:
    if _on_cpu(request):
        return _host(recipe.machine.processes, request.memory)
    if request.gpu is not None or request.memory is not None:
        return device_named(request.gpu, request.memory, request.gpu_table)
    if recipe.machine.device == "cpu":
        return _host(recipe.machine.processes, None)
    if "gpu" in request.fit:
        return max(devices(request.gpu_table).values(), key=lambda device: device.memory)
    raise InputError(
        "--gpu: the device is not set; use --gpu NAME (for example h100) or --memory GIB, or --gpu cpu for host "
        "memory; a recipe with machine.device: cpu uses this machine"
    )


def _on_cpu(request: PlanOptions) -> bool:
    return request.gpu is not None and request.gpu.lower() == "cpu"


def _host(processes: int, memory: float | None) -> Device:
    """A process's share of host memory: of so many GiB, or of this machine's."""
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30 if memory is None else memory
    whose = "this machine's memory" if memory is None else "the given memory"
    return Device("cpu", gib / processes, 0, 0, 0, 0, f"{whose} divided by its processes")


def _write_recipe(resolved: Resolved, target: str | Path, hub: str | None) -> None:
    """``hub``: the hub id of the model, where the plan took its published sizes."""
    values = resolved.recipe.model_dump(mode="json", exclude_defaults=True)
    if hub is not None:
        del values["model"]["config"]
        values["model"]["path"] = hub
    values["batch"] = {"micro_size": resolved.micro_size, "accumulation": resolved.accumulation}
    write_text(target, dump(values))


def _pixels(text: str | None) -> tuple[int, int] | None:
    """Height and width of «WIDTHxHEIGHT»."""
    if text is None:
        return None
    width, _, height = text.lower().partition("x")
    if not (width.isdigit() and height.isdigit() and int(width) and int(height)):
        raise InputError(f"--image-size {text}: width and height in pixels, for example 1024x768")
    return int(height), int(width)


def _loop_of(request: PlanOptions, start: Start) -> str:
    """The loop and its habits, those of a script where the command line says nothing else."""
    script = start.script
    habits = list(request.loop_set)
    if script is not None and request.loop in (None, script.loop):
        given = {habit.partition("=")[0] for habit in habits}
        habits = [habit for habit in script.habits if habit.partition("=")[0] not in given] + habits
    name = request.loop or ("toolkit" if script is None else script.loop)
    return " ".join([name, *habits])


def _of_loop(loop: Loop, name: str) -> list[str]:
    from toolkit.planning.loops.named import HABITS

    if name == "toolkit":
        return []
    habits = [f"--loop-set {habit}: {HABITS[habit.partition('=')[0]]}" for habit in name.split()[1:]]
    return [f"the loop of {loop.title}: {loop.source}", *habits]


def _assumptions(asked: Resolved, device: Device, rates: Rates) -> list[str]:
    data = asked.recipe.data
    rows = f"packed rows are full: {asked.micro_size * data.max_length:,} tokens per micro-batch"
    if not data.packing:
        rows = "every row is full: the maximum of a micro-batch"
    elif asked.recipe.model.attention == "flex_attention":
        rows += "; flex_attention's table of blocks is not counted"
    else:
        rows += "".join(f"; {option.unmasked}" for option, _ in asked_options(asked.recipe) if option.unmasked)
    found = [f"{device.name}: {device.source}", rows]
    if asked.device == "cuda":
        found += [
            f"not validated on a GPU yet; from published figures: CUDA context {context(device.name) / 2**20:.0f} MiB, "
            f"cuBLAS {workspaces(device.name) / 2**20:.0f} MiB, NCCL {nccl(asked.world_size) / 2**20:.0f} MiB, and "
            "what the allocator keeps",
            _of_rates(asked, device, rates),
        ]
    return found


def _of_rates(asked: Resolved, device: Device, rates: Rates) -> str:
    compute = asked.precision.compute
    if device.lacks(compute):
        return f"{device.name} computes nothing in {compute}: no times; set precision=fp16 or fp32"
    if not device.rate(compute):
        return "the device's rates are not known: no times"
    if not rates.by_kernel:
        return "rates measured on this machine"
    between = f"; {rates.between_nodes:g} GB/s between nodes, assumed" if asked.recipe.machine.nodes > 1 else ""
    return (
        f"rates fitted to published runs, steps of which took {rates.spread[0]:g} to {rates.spread[1]:g} of the "
        f"predicted time; links assumed{between}; --calibrate measures them"
    )
