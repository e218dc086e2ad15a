"""What is on its way to the disk: files are written, flushed and hashed by a thread while training goes on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from safetensors import SafetensorError

_WAITING = 1
"""Files that may wait while one is written: what saves faster than the disk takes it waits, so memory stays bounded."""

Action = Callable[[], None]


class Background:
    """Does actions one after another in a thread of its own. After the first that fails no other is done.

    ``failed`` is called at once, from where it failed, so that training can end before the next save would tell.
    """

    def __init__(self, failed: Callable[[], None] | None = None) -> None:
        self.problem: str | None = None
        self._failed = failed
        self._actions: queue.Queue[Action | None] = queue.Queue(maxsize=_WAITING)
        self._thread: threading.Thread | None = None

    def __call__(self, action: Callable[..., None], *arguments: Any) -> None:
        """Have it done; waits where one waits already."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="saving", daemon=True)
            self._thread.start()
        self._actions.put(partial(action, *arguments))

    def now(self, action: Callable[..., None], *arguments: Any) -> None:
        """Do it here, unless something failed before."""
        if self.problem is not None:
            return
        try:
            action(*arguments)
        except OSError as error:
            self.problem = error.strerror or str(error)
        except SafetensorError as error:
            self.problem = str(error)
        except Exception as error:  # raised in a thread nobody would see it: told as the reason, on every rank
            self.problem = f"{type(error).__name__}: {error}"
        if self.problem is not None and self._failed is not None:
            self._failed()

    def finish(self) -> str | None:
        """Wait for all of it; returns what failed."""
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
