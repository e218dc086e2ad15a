"""The server's side of a worker: one request at a time, a time limit, and a new process after a failure."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.errors import InputError
from toolkit.launch.signals import die_with_parent
from toolkit.studio.folders import Folders
from toolkit.studio.sandbox import own_folder
from toolkit.studio.worker import Settings

_LONGEST_ANSWER = 32 << 20
_SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY")


class Busy(Exception):
    """More requests wait than the server accepts."""


class Failed(Exception):
    """The task failed by a defect of the toolkit, or took too long. ``why``: for the page."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


@dataclass
class Worker:
    """``cache``: the hub's. ``heavy``: for plans, which import torch. ``waiting``: requests that may wait for their
    turn."""

    folders: Folders
    cache: Path
    public: bool
    heavy: bool
    waiting: int = 16
    _process: asyncio.subprocess.Process | None = None
    _settings: Settings | None = None
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _queue: int = 0

    async def call(
        self,
        task: str,
        arguments: dict[str, Any],
        seconds: float,
        given_up: Callable[[], Awaitable[bool]] | None = None,
    ) -> Any:
        """The answer of a task. ``given_up``: asked when its turn comes.

        Raises InputError with the task's own messages, Failed, or Busy.
        """
        if self._queue >= self.waiting:
            raise Busy
        self._queue += 1
        try:
            async with self._turn:
                if given_up is not None and await given_up():
                    raise Failed("given up")
                return await self._ask(task, arguments, seconds)
        finally:
            self._queue -= 1

    async def _ask(self, task: str, arguments: dict[str, Any], seconds: float) -> Any:
        process = await self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps({"task": task, "arguments": arguments}).encode() + b"\n")
            async with asyncio.timeout(seconds):
                await process.stdin.drain()
                line = await process.stdout.readline()
        except TimeoutError:
            await self.stop()
            raise Failed(f"This took longer than {seconds:.0f} s and was ended.") from None
        except asyncio.CancelledError:
            await self.stop()  # its answer would be the next one's
            raise
        except (OSError, ValueError):
            line = b""
        if not line:
            await self.stop()
            raise Failed("This needed more memory than a request may use, or ended the process that computed it.")
        answer = json.loads(line)
        if "problems" in answer:
            raise InputError(*answer["problems"])
        if "error" in answer:
            raise Failed(f"This failed inside the toolkit ({answer['error']}); the server's terminal shows where.")
        return answer["ok"]

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        await self.stop()
        self._settings = Settings(own_folder(), self.folders.roots, self.public, self.heavy, self.cache)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "toolkit.studio.worker",
            self._settings.to_text(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=_environment(self._settings),
            cwd=self._settings.own if self.public else None,
            limit=_LONGEST_ANSWER,
            preexec_fn=die_with_parent(),
            start_new_session=True,
        )
        return self._process

    async def stop(self) -> None:
        """End the process and remove its folder."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            await process.wait()
        if self._settings is not None:
            shutil.rmtree(self._settings.own, ignore_errors=True)
            self._settings = None


def _environment(settings: Settings) -> dict[str, str]:
    own = {"TMPDIR": str(settings.own), "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1",
           "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "PYTHONDONTWRITEBYTECODE": "1",
           "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "",
           "TORCHINDUCTOR_CACHE_DIR": str(settings.own), "TRITON_CACHE_DIR": str(settings.own)}  # fmt: skip
    kept = {key: value for key, value in os.environ.items() if key not in _SECRETS} if settings.public else os.environ
    own |= {"HF_HUB_CACHE": str(settings.cache)} | ({"HF_HUB_OFFLINE": "1"} if settings.public else {})
    return {**kept, **own}
