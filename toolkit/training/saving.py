"""Write, flush and hash files in a thread while training continues."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from safetensors import SafetensorError

from toolkit.errors import RunFailed

_WAITING = 1
"""Maximum number of queued files while one is written. If the disk is slower than the save, the save waits, so memory
is bounded."""

Action = Callable[[], None]


class Background:
    """Runs actions in order in its own thread.

    After the first failure no further action runs. ``failed`` is called at once, in that thread, so that training can
    end before the next save reports it.
    """

    def __init__(self, failed: Callable[[], None] | None = None) -> None:
        self.problem: str | None = None
        self._failed = failed
        self._actions: queue.Queue[Action | None] = queue.Queue(maxsize=_WAITING)
        self._thread: threading.Thread | None = None

    def __call__(self, action: Callable[..., None], *arguments: Any) -> None:
        """Queue an action; blocks if one is already queued."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="saving", daemon=True)
            self._thread.start()
        self._actions.put(partial(action, *arguments))

    def now(self, action: Callable[..., None], *arguments: Any) -> None:
        """Run it in this thread, unless an action failed before."""
        if self.problem is not None:
            return
        try:
            action(*arguments)
        except OSError as error:
            self.problem = error.strerror or str(error)
        except (SafetensorError, RunFailed) as error:
            self.problem = str(error)
        except Exception as error:  # raised in a thread nobody would see it: reported as the reason, on every rank
            self.problem = f"{type(error).__name__}: {error}"
        if self.problem is not None and self._failed is not None:
            self._failed()

    def finish(self) -> str | None:
        """Wait for all actions; returns the error, if any."""
        if self._thread is not None:
            self._actions.put(None)
            self._thread.join()
            self._thread = None
        return self.problem

    def _work(self) -> None:
        while True:
            action = self._actions.get()
            if action is None:
                return
            self.now(action)
            del action  # a file's tensors are not kept until the next one comes
