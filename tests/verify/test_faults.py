"""Known faults, injected where they happen: each is found, in the right stage, and its cause is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from toolkit.errors import InputError, NotSo
from toolkit.launch.group import WorkerGroup
from toolkit.recipe.resolve import Resolved
from toolkit.verify import run
from toolkit.verify.faults import fault_class, faults
from toolkit.verify.matrix import kill_matrix, what_caught
from toolkit.verify.passes import Pass
from toolkit.verify.run import verify


@pytest.mark.parametrize(
    ("fault", "strategy", "stage", "cause"),
    [
        ("data-same-shard", "fsdp2", "ledger", "every rank reads the same samples"),
        ("packing-leak", "single", "forward", "packed samples attend to each other"),
        ("packing-leak", "zero3", "forward", "packed samples attend to each other"),
        ("adapter-init", "single", "forward", "its own initialisation"),
        ("accum-mean-of-means", "ddp", "gradient", "averaged per micro-batch"),
        ("tokens-overcount", "single", "gradient", "never predicted"),
        ("grad-bucket-skipped", "zero2", "gradient", "reduced over the ranks"),
        ("dropout-redrawn", "fsdp2", "gradient", "new dropout masks"),
        ("clip-local-norm", "fsdp2", "clip", "norm of its own shard"),
        ("clip-ignored", "single", "clip", "never reaches the engine"),
        ("master-bf16", "single", "update", "without float32 masters"),
        ("optimizer-bf16-state", "single", "optimizer-state", "moments are kept in bf16"),
        ("lr-steps-per-process", "zero2", "schedule", "once per process"),
        ("overflow-not-shared", "ddp", "cross-rank", "disagree on skipping"),
        ("save-stale", "single", "round-trip", "bf16 copy"),
        ("resume-data-replayed", "single", "round-trip", "other samples"),
        ("merge-wrong", "single", "round-trip", "merged model is not the one"),
        ("silent-ddp", "zero3", "engagement", "does not engage"),
        ("checkpointing-off", "single", "engagement", "not applied"),
    ],
)
def test_a_fault_is_found_and_named(
    fault: str,
    strategy: str,
    stage: str,
    cause: str,
    recipe: Callable[..., Resolved],
    group: WorkerGroup,
    lone_group: WorkerGroup,
) -> None:
    workers = lone_group if strategy == "single" else group
    outcome = verify(recipe(strategy), group=workers, fault=fault, time_limit=120, stop_early=True)
    assert outcome.exit_code == 1
    assert outcome.verdict == ("not-exercised" if stage == "engagement" else "different")
    assert what_caught(outcome)[0] == stage
    assert stage in fault_class(fault).stages
    assert outcome.diagnosis is not None
    assert cause in outcome.diagnosis.cause


def test_a_fault_that_is_never_reached_is_an_error(
    recipe: Callable[..., Resolved], monkeypatch: pytest.MonkeyPatch, lone_group: WorkerGroup
) -> None:
    monkeypatch.setattr(run, "run_pass", lambda case, group, limit: Pass("logic", fault_reached=False))
    with pytest.raises(NotSo, match="never reached"):
        verify(recipe("single"), group=lone_group, fault="clip-ignored")


def test_a_fault_of_other_strategies_is_refused(recipe: Callable[..., Resolved]) -> None:
    with pytest.raises(InputError, match="not of this strategy"):
        verify(recipe("single"), fault="silent-ddp")
    with pytest.raises(InputError, match="did you mean clip-ignored"):
        verify(recipe("single"), fault="clip-ignore")


def test_no_comparison_knows_of_faults() -> None:
    """Comparison and diagnosis never read which fault or mutation is running, nor import the faults."""
    from pathlib import Path

    import toolkit.verify as room

    folder = Path(room.__path__[0])
    names = ["passes", "replay", "measure", "engagement", "causes", "causes_gradient", "causes_step", "attribution"]
    for file in [folder / f"{name}.py" for name in names] + sorted((folder / "stages").glob("*.py")):
        text = file.read_text(encoding="utf-8")
        for word in ("verify.faults", "case.fault", ".mutation", *faults()):
            assert word not in text, f"{file.name}: {word}"


@pytest.mark.slow
def test_every_fault_is_killed(recipe: Callable[..., Resolved], group: WorkerGroup, lone_group: WorkerGroup) -> None:
    told: list[str] = []
    cells = kill_matrix(recipe("ddp"), None, 120, told.append, groups={1: lone_group, 2: group})
    assert len(cells) > 150
    assert not [line for line, cell in zip(told, cells, strict=True) if not (cell.killed and cell.right)]


def test_a_run_that_hangs_or_dies_is_told_with_its_place(recipe: Callable[..., Resolved]) -> None:
    with WorkerGroup(1) as workers:
        outcome = verify(recipe("single"), group=workers, time_limit=0.05)
        assert outcome.verdict == "different"
        assert outcome.failure is not None
        assert outcome.failure.startswith("rank 0, before the first step: no answer")
        assert not workers._processes, "nothing is left behind"
