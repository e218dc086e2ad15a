"""A run as its folder shows it: recipe.json, metrics.jsonl, eval.jsonl, samples.jsonl, result.json,
checkpoints and logs.

Nothing is written or locked, and no process of the run is asked: a run does not notice that it is read. Any file may be
missing, cut off or hostile; what cannot be read is left out.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import stat
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from toolkit.launch.signals import name_of

State = Literal["starting", "running", "finished", "stopped", "ended early", "empty"]
ACTIVE: tuple[State, ...] = ("starting", "running")
MARK = "recipe.json"
MAX_METRICS = 64 << 20
_TEXT, _SAMPLES = 2000, 50
"""Characters of a prompt and of its answer, and answers, that are shown."""
_LOCKS = (".lock", ".lock-rank0")
_CHECKPOINT = re.compile(r"step-(\d{1,12})")
_LOG = re.compile(r"(rank\d{1,5}|launcher)\.log")
_NUMBERS = ("loss", "lr", "grad_norm", "tokens_per_second", "supervised_tokens_per_second", "tokens")


@dataclass(frozen=True)
class Step:
    """A line of metrics.jsonl; None for what was not finite or is missing."""

    step: int
    loss: float | None
    lr: float | None
    grad_norm: float | None
    tokens_per_second: float | None
    supervised_tokens_per_second: float | None
    """None in files of earlier versions, whose ``tokens_per_second`` are these."""
    tokens: float | None
    skipped: bool


@dataclass
class Run:
    """A run's folder at one moment. ``total``: steps, if the recipe or the result says. ``process``: the id of the
    process that holds the folder, the launcher or rank 0."""

    folder: Path
    state: State = "empty"
    process: int | None = None
    total: int | None = None
    steps: list[Step] = field(default_factory=list)
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    samples: list[tuple[str, str]] = field(default_factory=list)
    """The latest answers to ``run.sample_prompts``: prompt (of a conversation what was said last) and answer."""
    sampled: int = 0
    """The step that they are of."""
    checkpoints: list[int] = field(default_factory=list)
    logs: list[str] = field(default_factory=list)
    strategy: str | None = None
    result: dict[str, Any] = field(default_factory=dict)
    stopped: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What the guard and the watch said."""
    changed: float = 0.0
    """When metrics.jsonl last changed, seconds since the epoch."""

    @property
    def last(self) -> Step | None:
        return self.steps[-1] if self.steps else None

    @property
    def seconds_left(self) -> float | None:
        """Estimated from the tokens per step and per second of the last steps; None if that is not known."""
        rates = [(s.tokens, s.supervised_tokens_per_second or s.tokens_per_second) for s in self.steps[-20:]]
        recent = [tokens / rate for tokens, rate in rates if tokens and rate]
        if self.state != "running" or not recent or self.total is None:
            return None
        each = sum(recent) / len(recent)
        return max(0, self.total - self.steps[-1].step) * each


def read_run(folder: Path) -> Run:
    """The run in ``folder``; an empty one where there is none."""
    run = Run(folder)
    recipe = _object(folder / MARK).get("recipe")
    recipe = recipe if isinstance(recipe, dict) else {}
    run.strategy = _text(_inner(recipe, "strategy").get("name"))
    run.result, run.stopped = _object(folder / "result.json"), _object(folder / "stopped.json")
    run.steps = read_steps(folder / "metrics.jsonl")
    run.evaluations = _evaluations(folder / "eval.jsonl")
    run.sampled, run.samples = _samples(folder / "samples.jsonl")
    run.checkpoints = sorted(
        int(match.group(1)) for name in _names(folder / "checkpoints") if (match := _CHECKPOINT.fullmatch(name))
    )
    run.logs = sorted((name for name in _names(folder / "logs") if _LOG.fullmatch(name)), key=_by_number)
    run.process = holder(folder)
    run.total = _count(_inner(recipe, "run").get("max_steps"))
    try:
        run.changed = (folder / "metrics.jsonl").stat().st_mtime
    except OSError:
        run.changed = 0.0
    run.state = _state(run, bool(recipe))
    if run.state == "finished":
        run.total = run.steps[-1].step if run.steps else run.total
    run.notes = _notes(run)
    return run


def find_runs(root: Path, depth: int = 4, limit: int = 200) -> list[Path]:
    """Folders of runs under ``root``, at most ``depth`` deep, the latest first. Links are not followed."""
    found: list[tuple[float, Path]] = []
    _search(root, depth, found, [20_000], limit)
    return [path for _, path in sorted(found, key=lambda pair: -pair[0])]


def _search(folder: Path, depth: int, found: list[tuple[float, Path]], left: list[int], limit: int) -> None:
    if len(found) >= limit or left[0] <= 0:
        return
    try:
        with os.scandir(folder) as entries:
            inner = []
            for entry in entries:
                left[0] -= 1
                if left[0] <= 0:
                    break
                if entry.name == MARK and entry.is_file(follow_symlinks=False):
                    metrics = folder / "metrics.jsonl"
                    found.append(((metrics if metrics.exists() else folder / MARK).stat().st_mtime, folder))
                    return  # a run's folder holds no other runs
                hidden = entry.name.startswith((".", "node_modules", "site-packages", "__pycache__"))
                if depth > 0 and not hidden and entry.is_dir(follow_symlinks=False):
                    inner.append(entry.name)
    except OSError:
        return
    for name in sorted(inner):
        _search(folder / name, depth - 1, found, left, limit)


def read_steps(file: Path) -> list[Step]:
    """The steps of a metrics.jsonl, in order; a repeated step counts as it was last."""
    kept: dict[int, Step] = {}
    for entry in _lines(file):
        step = _count(entry.get("step"))
        if step is not None:
            numbers = {name: _number(entry.get(name)) for name in _NUMBERS}
            kept[step] = Step(step=step, skipped=entry.get("skipped") is True, **numbers)
    return [kept[step] for step in sorted(kept)]


def holder(folder: Path) -> int | None:
    """The process that holds the run's folder, asked of the kernel without locking anything; None if there is none.

    Locks of other machines, over a network file system, show as process 0 or not at all.
    """
    for name in _LOCKS:
        try:
            handle = os.open(folder / name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            # struct flock on 64-bit Linux: type, whence, start, length, process.
            answer = fcntl.fcntl(handle, fcntl.F_GETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0))
            kind, _, _, _, process = struct.unpack("hhqqi4x", answer)
            if kind != fcntl.F_UNLCK:
                return process
        except OSError:
            continue
        finally:
            os.close(handle)
    return None


def read_log(file: Path, limit: int = 64 << 10) -> str:
    """The end of a log, whole lines, at most ``limit`` bytes."""
    try:
        size = file.stat().st_size
        data = _regular(file, limit, max(0, size - limit))
    except OSError:
        return ""
    text = data.decode("utf-8", "replace")
    return text.partition("\n")[2] if size > limit else text


def _state(run: Run, known: bool) -> State:
    if run.process is not None:
        return "starting" if _before_its_first_step(run) else "running"
    if run.stopped:
        return "stopped"
    if run.result:
        return "finished"
    # Another machine's locks are not seen here, but what it writes is.
    if run.changed and time.time() - run.changed < 15:
        return "running"
    return "ended early" if known or run.steps else "empty"


def _before_its_first_step(run: Run) -> bool:
    """Whether what the folder shows is of an earlier start: the process that holds it has logged no step yet."""
    if not run.steps:
        return True
    try:
        return run.changed < Path(f"/proc/{run.process}").stat().st_mtime
    except OSError:  # another machine's process
        return False


def _notes(run: Run) -> list[str]:
    found = []
    skipped = sum(step.skipped for step in run.steps)
    if skipped:
        found.append(f"{skipped} steps were skipped (a bad loss, or an overflow)")
    lost = sum(step.loss is None and step.tokens != 0 for step in run.steps)
    if lost:
        found.append(f"the loss was not finite in {lost} steps")
    if empty := sum(step.tokens == 0 for step in run.steps):
        found.append(f"{empty} steps had no supervised token: no loss, and nothing was learned in them")
    launcher = run.folder / "logs" / "launcher.log"
    if run.state == "ended early" and launcher.name in run.logs:
        wanted = re.compile(r"^(?!.*Traceback).*(hangs|no heartbeat|rank \d+ failed|Error: |out of memory)", re.I)
        found += [line.strip()[:300] for line in read_log(launcher).splitlines() if wanted.match(line)][-3:]
    if run.stopped and run.state not in ACTIVE:
        found.append(f"stopped by {_signal(run.stopped.get('signal'))} at step {_count(run.stopped.get('step'))}")
    return found


def _signal(number: Any) -> str:
    try:
        return name_of(number)
    except (ValueError, TypeError):
        return "a signal"


def _object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(_regular(file, 4 << 20))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    try:
        data = _regular(file, MAX_METRICS)
    except OSError:
        return
    for line in data.split(b"\n"):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue  # the line that is being written, or a damaged one
        if isinstance(found, dict):
            yield found


def _regular(file: Path, limit: int, start: int = 0) -> bytes:
    handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError("not a regular file")
    with os.fdopen(handle, "rb") as opened:
        opened.seek(start)
        return opened.read(limit)


def _evaluations(file: Path) -> list[tuple[int, float]]:
    found = []
    for entry in _lines(file):
        step = _count(entry.get("step"))
        loss = _number(entry.get("eval_loss", entry.get("loss")))
        if step is not None and loss is not None and "eval_set" not in entry:
            found.append((step, loss))
    return found


def _samples(file: Path) -> tuple[int, list[tuple[str, str]]]:
    latest, found = 0, list[tuple[str, str]]()
    for entry in _lines(file):
        step, prompt, answer = _count(entry.get("step")), entry.get("prompt"), entry.get("answer")
        if isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict):
            prompt = prompt[-1].get("content")
        if step is None or not isinstance(prompt, str) or not isinstance(answer, str):
            continue
        if step != latest:
            latest, found = step, []
        found.append((prompt[:_TEXT], answer[:_TEXT]))
    return latest, found[-_SAMPLES:]


def _names(folder: Path) -> Sequence[str]:
    try:
        return sorted(os.listdir(folder))[:10_000]
    except OSError:
        return []


def _by_number(name: str) -> tuple[int, str]:
    digits = "".join(character for character in name if character.isdigit())
    return (int(digits) if digits else -1), name


def _inner(values: dict[str, Any], key: str) -> dict[str, Any]:
    found = values.get(key)
    return found if isinstance(found, dict) else {}


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**15 else None


def _text(value: Any) -> str | None:
    return value[:80] if isinstance(value, str) else None
