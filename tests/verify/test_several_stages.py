"""Where several stages fail, every verdict names each of them, the first difference first."""

from __future__ import annotations

from typing import Any

from toolkit.report.verify_page import _difference
from toolkit.results import Result
from toolkit.verification.checkpoints import screen as checkpoint_screen
from toolkit.verification.checkpoints.command import CheckpointComparison, _document
from toolkit.verification.checkpoints.compare import Compared
from toolkit.verification.checkpoints.contents import Checkpoint
from toolkit.verification.compare.measure import Measure, Stage
from toolkit.verification.matrix import what_caught
from toolkit.verification.outcome import Outcome
from toolkit.verification.passes import Pass
from toolkit.verification.screen import ending


def stages(*failing: str) -> list[Stage]:
    """Four stages of two steps each, of which some fail: update at step 1, gradient at step 2, and the other way."""
    found = []
    for name, kind, step in (
        ("gradient", "gradient", 1), ("clip", "gradient", 0), ("update", "update", 0), ("round-trip", "weight", 0),
    ):  # fmt: skip
        measures = [
            Measure(kind, at, 0.75 if name in failing and at == step else 0.0, 1e-6, f"{name}.weight") for at in (0, 1)
        ]
        found.append(Stage(name, measures, 1e-6))
    return found


def outcome(*passes: Pass) -> Outcome:
    run: Any = None
    return Outcome(run, run, list(passes))


def test_the_screen_the_page_and_the_result_name_each() -> None:
    found = outcome(Pass("logic", stages("gradient", "update", "round-trip")), Pass("precision", stages("clip")))
    lines = ending(found, 3.0, "recipe.yaml")
    heads = [line.split(":")[0] for line in lines if line.startswith(("different", "also"))]
    assert heads == [
        "different  at update, logic pass, step 1",
        "also       at gradient, logic pass, step 2",
        "also       at round-trip, logic pass, step 1",
        "also       at clip, precision pass, step 1",
    ]
    assert sum("75.0% off" in line for line in lines) == 4
    fields = found.fields()
    named = [(one["pass"], one["stage"], one["step"]) for one in fields["differences"]]
    assert named == [("logic", "update", 0), ("logic", "gradient", 1), ("logic", "round-trip", 0),
                     ("precision", "clip", 0)]  # fmt: skip
    assert fields["first_difference"] == fields["differences"][0]
    page = "".join(_difference(found))
    assert page.count("First difference at update, logic pass, step 1") == 1
    for place in ("gradient, logic pass, step 2", "round-trip, logic pass, step 1", "clip, precision pass, step 1"):
        assert f"Also at {place}" in page
    assert what_caught(found)[0] == "update"


def test_one_alone_has_no_others() -> None:
    found = outcome(Pass("logic", stages("gradient")))
    assert not [line for line in ending(found, 3.0, "recipe.yaml") if line.startswith("also")]
    assert len(found.fields()["differences"]) == 1
    assert outcome(Pass("logic", stages())).fields()["differences"] == []


def test_two_checkpoints_too() -> None:
    sides: Any = [Checkpoint(path, "folder", step=4) for path in ("A", "B")]
    compared = Compared(*sides, "float32")
    compared.stages = [
        Stage("step", [Measure("optimizer-steps", 3, 1.0, 0.0, facts={"a": 4, "b": 5})]),
        Stage("names", []),
        Stage("weights", [Measure("weight", 3, 0.5, 1e-6, "a.weight"), Measure("weight", 3, 0.0, 1e-6, "b.weight")]),
        Stage("optimizer-state", [Measure("moment", 3, 0.5, 1e-6, "a.weight", facts={"moment": "exp_avg"})]),
        Stage("schedule", []),
    ]
    document = _document(Result("verify"), [compared], None, None)
    assert [one["stage"] for one in document["differences"]] == ["step", "weights", "optimizer-state"]
    assert document["first_difference"] == document["differences"][0]
    result = CheckpointComparison(document, 1, (compared,), None)
    heads = [line for line in checkpoint_screen.lines(result) if line.startswith(("different", "also"))]
    assert [head.split(":")[0] for head in heads] == [
        "different  at step, step 4",
        "also       at weights, step 4",
        "also       at optimizer-state, step 4",
    ]
