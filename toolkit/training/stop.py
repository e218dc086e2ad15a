"""Stop a run after the current step on every rank. The ranks agree through a flag that is summed with the token counts,
so it needs no additional communication and no synchronisation."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable

import torch

from toolkit.launch.signals import STOPS, exit_code

_ONE_ASKING_S = 1.0
"""A terminal's Ctrl-C arrives twice within milliseconds, from the terminal and from torchrun."""


class Stop:
    """Whether this process was asked to stop, and whether all of them have agreed to.

    A thread reads what arrives, so that a second signal ends the process at once, also one that waits in a
    collective and runs no Python: what is saved is whole or not there, so that does no harm.
    """

    def __init__(self) -> None:
        self.asked = 0
        """The signal that this process received, 0 for none."""
        self.agreed = 0
        """The signal that the ranks agreed to stop for, 0 for none."""
        self._first = 0.0
        self._pipe: tuple[int, int] | None = None
        self._coming: tuple[torch.Tensor, torch.cuda.Event | None] | None = None

    def listen(self, signals: Iterable[signal.Signals]) -> None:
        """Handle these signals from now on; must be called by the main thread."""
        if self._pipe is None:
            read, write = os.pipe()
            os.set_blocking(write, False)
            self._pipe = read, write
            signal.set_wakeup_fd(write, warn_on_full_buffer=False)
            threading.Thread(target=self._read, args=(read,), daemon=True).start()
            os.register_at_fork(after_in_child=_leave_to_the_parent)
        for number in signals:
            signal.signal(number, _arrived)

    def _read(self, pipe: int) -> None:
        while True:
            for number in os.read(pipe, 64):
                self.ask(number)

    def ask(self, number: int) -> None:
        """One signal: the first asks to stop after the step, a later one ends the process."""
        if number not in STOPS:
            return  # SIGCHLD of a data worker comes the same way
        now = time.monotonic()
        if not self.asked:
            self.asked, self._first = number, now
        elif now - self._first > _ONE_ASKING_S:
            os._exit(exit_code(number))

    def give_up(self) -> None:
        """Stop every rank after its step without a signal: this rank's background work has failed."""
        self.asked = self.asked or int(signal.SIGTERM)

    # ------------------------------------------------------------------ what the loop calls

    def beside(self, count: torch.Tensor) -> torch.Tensor:
        """``count`` with what this rank asks for beside it, to be summed over ranks together."""
        # Filled in on the device, one by one: a copy from the host would wait for it.
        asked = [torch.full((), float(value), device=count.device) for value in (bool(self.asked), self.asked)]
        return torch.stack([count, *asked])

    def apart(self, summed: torch.Tensor) -> torch.Tensor:
        """The count again; what was asked comes after it, without a wait for the device."""
        flags, event = summed[1:], None
        if summed.is_cuda:
            flags = torch.empty(2, pin_memory=True).copy_(flags, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._coming = flags, event
        return summed[0]

    def now(self, device: torch.device) -> bool:
        """Whether to stop before the step is taken: where the flag is here already, on a CPU."""
        return device.type != "cuda" and self.after()

    def after(self) -> bool:
        """Whether to stop after the step whose sum has carried the flag. The host waits until the device has begun
        that step, all of which is queued by now: it is never more than a step ahead, and the device never idle."""
        if self._coming is None:
            return bool(self.agreed)
        flags, event = self._coming
        if event is not None:
            event.synchronize()
        asking, numbers = flags.tolist()
        if asking:
            named = numbers / asking  # ranks that were asked by different signals stop as preempted
            known = named.is_integer() and int(named) in {*map(int, signal.Signals)}
            self.agreed = int(named) if known else int(signal.SIGTERM)
        return bool(self.agreed)


def _arrived(number: int, frame: object) -> None:
    """Nothing: the thread has read it. A handler must be there for it to."""


def _leave_to_the_parent() -> None:
    """In a data worker: a warning to every process of the job is the rank's to answer, and only the rank ends it."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
