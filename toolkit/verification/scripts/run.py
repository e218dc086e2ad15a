"""Runs a command with the recorder in each of its Python processes, and leaves none of them behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from toolkit.errors import InputError
from toolkit.launch.host_memory import HostMemory
from toolkit.launch.signals import die_with_parent

VARIABLE = "TOOLKIT_RECORD"
"""In the environment of every process of a recorded command: the folder of its recording."""
_TAIL = 60
"""Lines of standard error that are kept: torchrun's summary has some 20."""
_RANK_KILLED = re.compile(r"^rank +: (\d+) .*\nexitcode +: -9\b", re.MULTILINE)
"""In torchrun's summary."""
_SOME_KILLED = re.compile(r"Signal 9 \(SIGKILL\)|exitcode: -9\b|return code = -9\b")
"""Of torch's and of DeepSpeed's launcher."""
_GRACE_S = 10.0
"""Seconds that processes get to end after SIGTERM."""


@dataclass
class Ended:
    """How a command ended. ``code``: its exit status, negative for a signal. ``last``: the last line that it wrote, or
    of the first traceback. ``stopped``: its recording was complete, and it was stopped then."""

    code: int
    last: str
    timed_out: bool = False
    stopped: bool = False
    processes: list[dict[str, Any]] = field(default_factory=list)
    refused: str = ""
    memory: dict[str, Any] | None = None
    """Of a process that ended by memory: ``memory.whereabouts``."""
    killed: str = ""
    """The process that SIGKILL ended, and what memory the host had left; empty if none was."""
    seconds: float = 0.0


def prepare(session: Path, steps: int, after: int, on_cpu: bool, copies: bool = False) -> dict[str, str]:
    """Fill ``session``, an empty folder; returns the environment of a command that is recorded there. ``copies``: copy
    models too, for what transformers cannot build again."""
    import toolkit

    site = session / "site"
    site.mkdir()
    shutil.copyfile(Path(__file__).with_name("stub.py"), site / "sitecustomize.py")
    (session / "root").write_text(str(Path(toolkit.__file__).parent.parent), encoding="utf-8")
    settings = {"steps": steps, "after": after, "on_cpu": on_cpu, "copies": copies}
    (session / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    path = os.environ.get("PYTHONPATH")
    return dict(os.environ) | {
        VARIABLE: str(session),
        "PYTHONPATH": str(site) + (os.pathsep + path if path else ""),
    }


def run(
    command: Sequence[str], environment: dict[str, str], session: Path, timeout: float | None, stop: bool, quiet: bool
) -> Ended:
    """Run ``command`` to its end, its output on this terminal (on standard error if ``quiet``).

    ``timeout``: seconds until it is ended. ``stop``: end it once its recording is complete. Raises InputError where
    the command cannot be started.
    """
    lines: deque[str] = deque(maxlen=_TAIL)
    host, begun = HostMemory(), time.monotonic()
    with _terminated():
        try:
            job = subprocess.Popen(
                list(command),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr if quiet else None,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        except FileNotFoundError:
            raise InputError(f"{command[0]}: command not found") from None
        except OSError as error:
            raise InputError(f"{command[0]}: {error.strerror}") from None
        assert job.stderr is not None
        silent = threading.Event()
        reader = threading.Thread(target=_relay, args=(job.stderr, lines, silent), daemon=True)
        reader.start()
        timed_out = stopped = False
        try:
            timed_out, stopped = _wait(job, session, timeout, stop, host.look)
        finally:
            if stopped:
                silent.set()  # what a launcher says of being ended is no news
            if job.poll() is None:
                _end(job, session)
            reader.join(2.0)
            _end_others(session)
    failure = session / "failure"
    reason = failure.read_text(encoding="utf-8") if failure.exists() else (lines[-1] if lines else "")
    refused, memory = session / "refused", session / "memory.json"
    return Ended(
        job.returncode,
        reason,
        timed_out,
        stopped,
        [json.loads(file.read_text(encoding="utf-8")) for file in sorted(session.glob("process-*.json"))],
        refused.read_text(encoding="utf-8").splitlines()[0] if refused.exists() else "",
        json.loads(memory.read_text(encoding="utf-8")) if memory.exists() else None,
        _killed(job.returncode, "\n".join(lines), host) if not (timed_out or stopped) else "",
        time.monotonic() - begun,
    )


def run_alone(command: Sequence[str], session: Path, timeout: float) -> int | None:
    """The exit status of ``command`` without recording, nothing of what it writes shown; None after ``timeout``
    seconds, when it is ended. ``session``: an empty folder, which marks its processes."""
    with _terminated():
        job = subprocess.Popen(
            list(command),
            env=dict(os.environ) | {VARIABLE: str(session)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
        try:
            return job.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if job.poll() is None:
                _end(job, session)
            _end_others(session)


def _killed(code: int, text: str, host: HostMemory) -> str:
    """``text``: the end of standard error, on which launchers say how a rank ended."""
    rank = _RANK_KILLED.search(text)
    if rank is None and code not in (-signal.SIGKILL, 128 + signal.SIGKILL) and not _SOME_KILLED.search(text):
        return ""
    who = f"rank {rank[1]}" if rank is not None else "the command" if code < 0 else "a process of it"
    return f"{who} was ended by SIGKILL{host.told()}"


def _wait(
    job: subprocess.Popen[bytes], session: Path, timeout: float | None, stop: bool, look: Callable[[], None]
) -> tuple[bool, bool]:
    begun = time.monotonic()
    while True:
        look()
        try:
            job.wait(0.1)
            return False, False
        except subprocess.TimeoutExpired:
            pass
        if timeout is not None and time.monotonic() - begun > timeout:
            return True, False
        if stop and complete(session):
            return False, True


def complete(session: Path) -> bool:
    """Whether every rank has written its part of a model."""
    return any(whole(folder) for folder in (session / "models").glob("*"))


def whole(folder: Path) -> bool:
    """Whether every rank has written its part of this model."""
    world = folder / "world"
    expected = world.read_text(encoding="utf-8") if world.exists() else ""
    return expected != "" and len(list(folder.glob("rank*.pt"))) >= int(expected)  # empty while it is being written


def _relay(stream: BinaryIO, lines: deque[str], silent: threading.Event) -> None:
    for raw in stream:
        if silent.is_set():
            continue
        sys.stderr.buffer.write(raw)
        sys.stderr.flush()
        if (text := raw.decode("utf-8", errors="replace").strip()) and text.strip("=- "):
            lines.append(text)


@contextlib.contextmanager
def _terminated() -> Iterator[None]:
    """SIGTERM, as Ctrl-C does, ends the command before this process."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(job: subprocess.Popen[bytes], session: Path) -> None:
    """SIGTERM to all processes, then SIGKILL to those that are left."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in _processes(session):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(_GRACE_S)
            return


def _end_others(session: Path) -> None:
    """Launchers start ranks in sessions of their own, which outlive a launcher that was killed."""
    left = _processes(session)
    deadline = time.monotonic() + 2.0
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = _processes(session)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _processes(session: Path) -> list[int]:
    """Every process with this recording in its environment, but this one."""
    mark = f"{VARIABLE}={session}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0") and int(folder.name) != os.getpid():
                found.append(int(folder.name))
        except OSError:
            continue
    return found
