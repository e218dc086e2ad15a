"""What `toolkit compare A B` prints, readable without colour. Paths stay whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit.terminal import fitted
from toolkit.verification.checkpoints.compare import Compared
from toolkit.verification.checkpoints.contents import Checkpoint
from toolkit.verification.compare.measure import Stage, also, off_by

if TYPE_CHECKING:
    from toolkit.verification.checkpoints.command import CheckpointComparison


_CELL = 18
"""Columns before what is said of a stage or a step."""


def lines(result: CheckpointComparison, columns: int = 100) -> list[str]:
    """What was compared, the stages of the last step, the verdict and its likely cause, in so many columns."""
    last = result.steps[-1]
    notes = dict.fromkeys(note for one in result.steps for note in (*one.a.notes, *one.b.notes, *one.notes))
    said = [*_sides(last.a, last.b), *(f"note: {note}" for note in notes)]
    rows = [(f"step {one.step}", f"ok   {_equal(one)}") for one in result.steps[:-1]]
    rows += [(stage.name, _cell(stage)) for stage in last.stages]
    return [
        *(part for line in said for part in fitted(line, columns)),
        "",
        f"{'stage':<{_CELL}}verdict: error of its tolerance",
        *(part for name, cell in rows for part in _row(name, cell, columns)),
        "",
        *(part for line in _ending(result) for part in fitted(line, columns)),
    ]


def _row(name: str, cell: str, columns: int) -> list[str]:
    """A row of the table; what goes on is below the words of its cell."""
    first, *more = fitted(" " * (_CELL + 3) + cell, columns)
    return [f"{name:<{_CELL}}{first.lstrip()}", *more]


def _sides(a: Checkpoint, b: Checkpoint) -> list[str]:
    found = []
    for head, one in (("compare A", a), ("        B", b)):
        moments = sum(map(len, one.moments.values()))
        step = f"step {one.step}" if one.step is not None else "step not known"
        found.append(f"{head}  {one.path}")
        found.append(f"           {one.format} · {step} · {len(one.weights)} weights, {moments} moments")
        if a.renamed != b.renamed:
            found += [f"           names: {rule}" for rule in one.renamed]
    return found


def _cell(stage: Stage) -> str:
    if not stage.ok:
        return f"FAIL {len(stage.wrong)} of {len(stage.measures)}"
    if not stage.measures:
        return f"-    {stage.summary}"
    worst = max((m for m in stage.measures if m.tolerance > 0), key=lambda m: m.ratio, default=None)
    if stage.name in ("weights", "optimizer-state") and worst is not None:
        return f"ok   {worst.error:.1e} of {worst.tolerance:.1e} · {stage.summary}"
    return f"ok   {stage.summary}"


def _equal(one: Compared) -> str:
    return "bit for bit equal" if one.bit_equal else "within tolerance"


def _ending(result: CheckpointComparison) -> list[str]:
    seconds = f"{result.document['seconds']:.0f} s"
    different = result.different
    if different is None:
        last = result.steps[-1]
        if last.bit_equal:
            return [f"equivalent · bit for bit equal · {seconds}"]
        limits = [f"{limit:.1e}" for limit in sorted(_least_and_most(last))]
        caught = f" · detects gradient errors from {' (a wrong scale) or '.join(limits)}" if limits else ""
        caught += " (any one tensor)" if len(limits) > 1 else ""
        return [f"equivalent{caught} · {seconds}"]
    one, stage, measure = different
    found = [f"different  at {stage.name}{_place(one)}: {measure.tensor}"]
    if measure.tolerance > 0:
        found.append(f"           {off_by(measure)}, tolerance {measure.tolerance:.1e}")
    if measure.sentence:
        found.append(f"           {measure.sentence}")
    if len(stage.measures) > 1:
        found.append(f"           {len(stage.wrong)} of {len(stage.measures)} comparisons fail in {stage.name}")
    for other, first in one.differences[1:]:
        found += also(_place(one), other, first, first.tensor)
    if result.diagnosis is not None:
        found += [f"likely     {result.diagnosis.cause}", f"           {result.diagnosis.evidence}"]
        found += [f"try        {result.diagnosis.remedy}"] if result.diagnosis.remedy else []
    return [*found, f"add --json - for every stage's numbers · {seconds}"]


def _least_and_most(one: Compared) -> set[float]:
    """The smallest and the largest detection limit of any tensor."""
    limits = one.limits(one.stage("optimizer-state")).values()
    return {float(f"{limit:.1e}") for limit in (min(limits), max(limits))} if limits else set()


def _place(one: Compared) -> str:
    return f", step {one.step}" if one.step is not None else ""
