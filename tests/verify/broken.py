"""Candidates that do not get to their end: rank 1 raises, dies or hangs in its third forward."""

from __future__ import annotations

import os
import time

from toolkit.training import loop
from toolkit.verification.cases.case import Case
from toolkit.verification.record import worker
from toolkit.verification.record.worker import resume_case, run_case


def raises(case: Case) -> None:
    _break(case, _raise)


def dies(case: Case) -> None:
    _break(case, lambda: os._exit(9))


def aborts(case: Case) -> None:
    def abort() -> None:
        os.write(2, b"the heap is broken\n")
        os.abort()

    _break(case, abort)


def hangs(case: Case) -> None:
    _break(case, lambda: time.sleep(600))


def breaks_where_it_exports(case: Case) -> None:
    """A job in the place of `resume_case`."""
    right, worker.exported_answers = worker.exported_answers, lambda *_: _raise()  # type: ignore[assignment, func-returns-value]
    try:
        resume_case(case)
    finally:
        worker.exported_answers = right


def _raise() -> None:
    raise RuntimeError("the device is on fire")


def _break(case: Case, how: object) -> None:
    right, calls = loop.loss_sum, iter(range(10**6))

    def wrong(*args: object, **kwargs: object) -> object:
        if next(calls) == 2 and os.environ["RANK"] == "1":
            how()  # type: ignore[operator]
        return right(*args, **kwargs)  # type: ignore[arg-type]

    loop.loss_sum = wrong  # type: ignore[assignment]
    try:
        run_case(case)
    finally:
        loop.loss_sum = right
