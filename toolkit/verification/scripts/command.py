"""`toolkit record` and `toolkit prove`: run, keep what was recorded, verify, print, write."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import InputError, RunFailed
from toolkit.results import CommandResult, Result
from toolkit.terminal import working
from toolkit.verification.scripts.memory import told
from toolkit.verification.scripts.run import Ended, prepare, run, run_alone, whole

FILE = "record.json"
"""In a recorded folder: what was recorded of which command."""
_SHORT_S = 60.0
"""Of a command that is run again when it failed."""


class CommandFailed(RunFailed):
    """The recorded command failed. ``exit_code``: its own status, or 128 plus the signal that ended it."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code if code > 0 else 128 - code


@dataclass(frozen=True)
class Recorded(CommandResult):
    """What `toolkit record` gives."""

    folder: Path

    @property
    def models(self) -> list[dict[str, Any]]:
        """The models of the command: class, tensors that train, steps that were recorded."""
        return self.document["models"]


def record(
    command: Sequence[str],
    folder: str | Path,
    *,
    steps: int = 3,
    after: int = 0,
    timeout: float | None = None,
    stop: bool = False,
    on_cpu: bool = False,
    quiet: bool = False,
    copies: Path | None = None,
) -> Recorded:
    """Run an unmodified training command and keep its optimizer steps ``after + 1`` to ``after + steps`` in ``folder``.

    ``timeout``: seconds until the command is ended. ``stop``: end it once the steps are recorded. ``on_cpu``: on a
    machine without a GPU, connect the processes that accelerate launches for FSDP or DeepSpeed. ``quiet``: its standard
    output goes to standard error. ``copies``: a folder for copies of the models, which only this machine should read.

    Raises InputError if the command cannot be run or there is nothing to record, CommandFailed if it fails.
    """
    result = Result("record")
    target = Path(folder)
    _check(command, target)
    before = _written(target)
    with tempfile.TemporaryDirectory(prefix="toolkit-record-") as name:
        session = Path(name)
        try:
            environment = prepare(session, steps, after, on_cpu, copies is not None)
        except OSError as error:
            raise InputError(f"{session}: {error.strerror}; TMPDIR chooses another folder") from None
        ended = run(command, environment, session, timeout, stop, quiet)
        models = session / "models"
        numbers = _complete(models)
        if ended.code and not (ended.stopped or ended.timed_out):
            _raise_crash(command, ended, "" if on_cpu else _recordings_part(command, ended, timeout))
        _raise_nothing(command, ended, numbers, timeout)
        document = result.finish(
            recipe_sha256=None,
            device=None,
            recorded=list(command),
            folder=str(target),
            steps=steps,
            after=after,
            models=_models(ended, numbers),
            not_seen=_not_seen(ended, numbers),
        )
        if copies is not None and (session / "copies").exists():
            shutil.move(str(session / "copies"), str(copies))
        if _written(target) != before:
            raise InputError(f"-o {target}: another command wrote this folder meanwhile; this recording is not kept")
        _move(models, numbers, target, document)
    return Recorded(document, 0, target)


def _check(command: Sequence[str], target: Path) -> None:
    if not command:
        raise InputError("expected a command after --, for example: toolkit record -o DIR -- python train.py")
    if shutil.which(command[0]) is None:
        raise InputError(f"{command[0]}: command not found")
    if target.exists() and (not target.is_dir() or (any(target.iterdir()) and not (target / FILE).exists())):
        raise InputError(f"-o {target}: exists and is not a recording; choose another folder")


def _complete(models: Path) -> list[int]:
    """The models that every rank has written."""
    found = []
    for folder in sorted(models.glob("*"), key=lambda one: int(one.name)):
        if whole(folder):
            found.append(int(folder.name))
    return found


def _named(command: Sequence[str]) -> str:
    return " ".join(command[:3]) + (" …" if len(command) > 3 else "")


def _raise_crash(command: Sequence[str], ended: Ended, part: str) -> None:
    how = f"exit status {ended.code}" if ended.code > 0 else f"ended by signal {-ended.code}"
    said = [f"{_named(command)}: {how}: {ended.last or 'it wrote nothing'}"]
    said += told(ended.memory) if ended.memory else []
    raise CommandFailed("\n".join([*said, *filter(None, (ended.killed, part))]), ended.code)


def _recordings_part(command: Sequence[str], ended: Ended, timeout: float | None) -> str:
    """Whether a command that failed fails without being recorded too, in words: a short one is run again, for at most
    ``timeout`` seconds."""
    if not ended.processes:
        return ""  # nothing was recorded: no process of it imported torch
    if ended.seconds > _SHORT_S:
        return f"it ran for {ended.seconds:.0f} s and is not run again: whether it fails without toolkit is not known"
    with (
        tempfile.TemporaryDirectory(prefix="toolkit-alone-") as name,
        working("running the command again without recording, to see whether that had a part in it"),
    ):
        limit = min(2 * ended.seconds + 30, math.inf if timeout is None else timeout)
        code = run_alone(command, Path(name), limit)
    if code is None:
        return f"run again without recording, it did not end in {limit:.0f} s: recording may have a part in it"
    if code == 0:
        return "run again without recording, it ended well: recording had a part in it. Please report it"
    return f"run again without recording, it failed too ({'exit status' if code > 0 else 'signal'} {abs(code)})"


def _raise_nothing(command: Sequence[str], ended: Ended, numbers: list[int], timeout: float | None) -> None:
    if ended.timed_out:
        state = "its steps were recorded, but are not kept" if numbers else "nothing was recorded"
        raise RunFailed(f"{_named(command)}: still running after {timeout:g} s (--timeout) and was ended; {state}")
    if not numbers:
        raise InputError(f"{_named(command)}: nothing to record: {_why_nothing(ended)}")


def _why_nothing(ended: Ended) -> str:
    errors = [one["error"] for one in ended.processes if one["error"]]
    if errors:
        return errors[0]
    if ended.refused:
        return ended.refused
    if not ended.processes:
        return "no Python process of it imported torch and read PYTHONPATH (python -I and -E do not)"
    models = [model for one in ended.processes for model in one["models"]]
    if not models:
        return "no model was prepared: it made no optimizer and wrapped no model"
    trained = [model for model in models if model["trained"]]
    if not trained:
        return f"nothing trains: every parameter of {models[0]['class']} is frozen"
    if reasons := [model["failed"] for model in trained if model["failed"]]:
        return reasons[0]
    first = trained[0]
    if not first["steps_seen"]:
        return f"nothing trains: no optimizer step of {first['class']} was taken"
    return f"{first['class']} took {first['steps_seen']} optimizer steps, too few; see --steps and --after"


def _models(ended: Ended, numbers: list[int]) -> list[dict[str, Any]]:
    main = next(
        (one for one in ended.processes if one["rank"] == 0 and any(m["recorded"] for m in one["models"])), None
    )
    found = []
    for at, model in enumerate(main["models"] if main else []):
        found.append(
            {"model": at, "class": model["class"], "trained": model["trained"], "recorded": at in numbers,
             "steps_seen": model["steps_seen"], "failed": model["failed"]}
        )  # fmt: skip
    return found


def _not_seen(ended: Ended, numbers: list[int]) -> list[str]:
    found = []
    for model in _models(ended, numbers):
        if not model["trained"]:
            found.append(f"{model['class']}: frozen, not recorded")
        elif not model["recorded"]:
            if model["failed"]:
                found.append(f"{model['class']}: not recorded: {model['failed']}")
                continue
            found.append(f"{model['class']}: took {model['steps_seen']} optimizer steps, not recorded")
    unseen = {why for one in ended.processes for model in one["models"] for why in model["unseen"]}
    return found + sorted(unseen)


def _written(target: Path) -> int | None:
    """When a recording was written to ``target``; None if none is there."""
    try:
        return (target / FILE).stat().st_mtime_ns
    except OSError:
        return None


def _move(models: Path, numbers: list[int], target: Path, document: dict[str, Any]) -> None:
    """All or nothing: the folder appears when it is complete."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        writing = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise InputError(f"-o {target}: cannot be written: {error.strerror}; this recording is not kept") from None
    try:
        for number in numbers:
            shutil.move(str(models / str(number)), str(writing / str(number)))
        (writing / FILE).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        writing.chmod(0o755)
        if target.exists():
            shutil.rmtree(target)
        writing.rename(target)
    except OSError as error:
        # shutil.Error, of a copy to another disk, lists what failed: source, target and reason of each file.
        why = error.strerror or str(error.args[0][0][2]).partition("] ")[2].partition(": '")[0]
        raise InputError(f"-o {target}: cannot be written: {why}; this recording is not kept") from None
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(writing)
