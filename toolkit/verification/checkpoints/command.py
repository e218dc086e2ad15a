"""`toolkit compare A B`, or `toolkit verify --checkpoint A --checkpoint B`; `compare_checkpoints` of the Python API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import InputError
from toolkit.results import CommandResult, Result, write_json
from toolkit.terminal import width
from toolkit.verification.checkpoints import screen
from toolkit.verification.checkpoints.compare import Compared, compare
from toolkit.verification.checkpoints.contents import Checkpoint
from toolkit.verification.checkpoints.diagnose import diagnose
from toolkit.verification.checkpoints.find import Place, places, read
from toolkit.verification.checkpoints.names import with_common_prefix
from toolkit.verification.checkpoints.numbered import name_moments
from toolkit.verification.compare.measure import Measure, Stage
from toolkit.verification.diagnose.diagnosis import Diagnosis


@dataclass(frozen=True)
class CheckpointComparison(CommandResult):
    """What `toolkit compare A B` gives."""

    steps: tuple[Compared, ...]
    """Each compared step, with its stages and measures as objects. After the first that differs none is compared."""
    diagnosis: Diagnosis | None
    """The likely cause of a difference."""

    @property
    def verdict(self) -> str:
        """``equivalent`` or ``different``."""
        return str(self.document["verdict"])

    @property
    def different(self) -> tuple[Compared, Stage, Measure] | None:
        """The first step, stage and tensor that differ."""
        return _different(self.steps)


def run_checkpoints(
    paths: Sequence[str | Path], tolerance: float | None, json_target: str | None, command: str = "verify"
) -> int:
    """Compare, print and write; returns the exit status. Raises InputError."""
    if len(paths) != 2:
        raise InputError(f"--checkpoint: given {len(paths)} times; expected twice, once for each checkpoint")
    found = compare_two(paths[0], paths[1], tolerance=tolerance, command=command)
    if json_target != "-":
        print("\n".join(screen.lines(found, min(100, width()))))
    if json_target:
        write_json(found.to_json(), json_target)
    return found.exit_code


def compare_two(
    a: str | Path, b: str | Path, *, tolerance: float | None = None, command: str = "verify"
) -> CheckpointComparison:
    """Compare two checkpoints, or each step that two runs both have. ``tolerance``: relative, for every tensor.

    Raises InputError if one cannot be read, or if the two have no tensor in common.
    """
    if tolerance is not None and not 0 <= tolerance < float("inf"):
        raise InputError(f"--tolerance: {tolerance:g}: expected a relative error, 0 or larger")
    result = Result(command)
    steps: list[Compared] = []
    for left, right in _pairs(str(a), str(b)):
        steps.append(_compare(left, right, tolerance))
        if steps[-1].different:
            break
    different = _different(steps)
    diagnosis = diagnose(different[0]) if different else None
    document = _document(result, steps, diagnosis, tolerance)
    return CheckpointComparison(document, int(different is not None), tuple(steps), diagnosis)


def _different(steps: Sequence[Compared]) -> tuple[Compared, Stage, Measure] | None:
    return next(((one, *found) for one in steps if (found := one.different) is not None), None)


def _pairs(a: str, b: str) -> list[tuple[Place, Place]]:
    """Which step of A is compared with which of B."""
    left, right = places(a), places(b)
    if len(left) == len(right) == 1:
        return [(left[0], right[0])]
    if len(left) > 1 and len(right) > 1:
        there = {place.number: place for place in right}
        common = [(place, there[place.number]) for place in left if place.number in there]
        if not common:
            known = [", ".join(str(place.number) for place in found) for found in (left, right)]
            raise InputError(f"no step in common: {a} has {known[0]}, {b} has {known[1]}")
        return common
    single, several = (left[0], right) if len(left) == 1 else (right[0], left)
    step = read(single).step
    match = next((place for place in several if place.number == step), several[-1])
    return [(single, match) if len(left) == 1 else (match, single)]


def _compare(left: Place, right: Place, tolerance: float | None) -> Compared:
    a, b = with_common_prefix(read(left), read(right))
    common = [name for name in a.weights if name in b.weights]
    if not any(a.weights[name].shape == b.weights[name].shape for name in common):
        first = common[0] if common else ""
        if first:
            shapes = f"{first} has shape {list(a.weights[first].shape)} in A and {list(b.weights[first].shape)} in B"
        else:
            shapes = f"A has {len(a.weights)} tensors, first {_first(a)}; B has {len(b.weights)}, first {_first(b)}"
        raise InputError(f"{left.path} and {right.path} are of different models: {shapes}")
    name_moments(a, b)
    name_moments(b, a)
    return compare(a, b, tolerance)


def _first(checkpoint: Checkpoint) -> str:
    return min(checkpoint.weights)


def _document(
    result: Result, steps: Sequence[Compared], diagnosis: Diagnosis | None, tolerance: float | None
) -> dict[str, Any]:
    different = _different(steps)
    found: list[dict[str, Any]] = []
    if different is not None:
        one = different[0]
        found = [{"pass": _name(one), "stage": stage.name} | first.to_json() for stage, first in one.differences]
    notes = dict.fromkeys(note for one in steps for note in (*one.a.notes, *one.b.notes, *one.notes))
    return result.finish(
        recipe_sha256=None,
        device="cpu",
        verdict="equivalent" if different is None else "different",
        bit_equal=all(one.bit_equal for one in steps),
        checkpoints=[{"a": one.a.to_json(), "b": one.b.to_json()} for one in steps],
        passes=[
            {
                "pass": _name(one),
                "failure": None,
                "tolerance": "measured" if tolerance is None else "given",
                "measured_because": f"correct runs in {one.compute} differ" if tolerance is None else None,
                "stages": [stage.to_json() for stage in one.stages],
            }
            for one in steps
        ],
        engagement=[],
        first_difference=found[0] if found else None,
        differences=found,
        diagnosis=None if diagnosis is None else diagnosis.to_json(),
        failure=None,
        notes=list(notes),
    )


def _name(one: Compared) -> str:
    return f"step {one.step}" if one.step is not None else "checkpoint"
