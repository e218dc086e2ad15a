"""Known faults, injected where they happen: each is found, in the right stage, and its cause is named."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import broken
import psutil
import pytest

import model_types
from families import HYBRIDS
from toolkit.errors import InputError, RunFailed
from toolkit.launch.group import WorkerGroup
from toolkit.recipe.resolve import Resolved
from toolkit.verification import matrix, passes, run
from toolkit.verification.cases.case import Case
from toolkit.verification.diagnose.known import known
from toolkit.verification.faults import fault_class, faults
from toolkit.verification.matrix import kill_matrix, what_caught
from toolkit.verification.outcome import Outcome
from toolkit.verification.passes import Pass
from toolkit.verification.run import verify

FOUND = [
    ("data-same-shard", "fsdp2", "ledger", "same-samples-on-every-rank"),
    ("data-duplicated", "single", "ledger", "samples-repeated"),
    ("data-duplicated", "zero2", "ledger", "samples-repeated"),
    ("data-dropped-tail", "ddp", "ledger", "remainder-dropped"),
    ("labels-unmasked", "ddp", "ledger", "wrong-labels"),
    ("image-tokens-masked", "ddp", "ledger", "image-tokens-supervised"),
    ("batch-norm-local", "fsdp2", "forward", "batch-statistics-of-each-rank"),
    ("optimizer-stale", "ddp", "optimizer-state", "other-parameters-updated"),
    ("group-rate-ignored", "ddp", "schedule", "rate-of-a-group"),
    ("freeze-ignored", "ddp", "gradient", "frozen-weight-trains"),
    ("label-smoothing-ignored", "single", "forward", "loss-term-missing"),
    ("z-loss-unmasked", "single", "forward", "z-loss-of-every-token"),
    ("neftune-padded-length", "ddp", "forward", "noise-of-padded-length"),
    ("muon-of-a-shard", "fsdp2", "update", "update-of-a-shard"),
    ("tied-weights-split", "single", "gradient", "tied-weights-separate"),
    ("packing-leak", "single", "forward", "packed-samples-attend"),
    ("packing-leak", "zero3", "forward", "packed-samples-attend"),
    ("adapter-init", "single", "forward", "adapter-initialisation"),
    ("accum-mean-of-means", "ddp", "gradient", "mean-per-micro-batch"),
    ("accum-last-unreduced", "zero2", "gradient", "last-micro-batch-not-reduced"),  # each tensor has another rank's
    ("tokens-overcount", "single", "gradient", "unpredicted-tokens-counted"),
    ("grad-bucket-skipped", "zero2", "gradient", "tensors-not-reduced"),
    ("dropout-redrawn", "fsdp2", "gradient", "dropout-mask-redrawn"),
    ("checkpoint-no-grad", "single", "gradient", "reentrant-checkpointing"),
    ("grad-accum-bf16", "single", "gradient", "sums-rounded-to-16-bits"),
    ("clip-local-norm", "fsdp2", "clip", "norm-of-one-shard"),
    ("clip-ignored", "single", "clip", "clipping-missing"),
    ("master-bf16", "single", "update", "masters-missing"),
    ("optimizer-bf16-state", "single", "optimizer-state", "moments-in-bf16"),
    ("lr-steps-per-process", "zero2", "schedule", "scheduler-per-process"),
    ("overflow-not-shared", "ddp", "cross-rank", "skip-disagreement"),
    ("resume-average-lost", "fsdp2", "round-trip", "average-not-restored"),
    ("evaluated-at-y", "fsdp2", "forward", "evaluation-not-at-average"),
    ("evaluated-with-stale-copy", "zero2", "forward", "evaluation-copy-stale"),
    ("evaluated-with-stale-copy", "zero3", "forward", "evaluation-copy-stale"),
    ("exported-at-y", "single", "round-trip", "export-not-average"),
    ("save-stale", "single", "round-trip", "saved-16-bit-copy"),
    ("resume-data-replayed", "single", "round-trip", "resumed-samples"),
    ("merge-wrong", "single", "round-trip", "export-differs"),
    ("silent-ddp", "zero3", "engagement", "collectives-missing"),
    ("checkpointing-off", "single", "engagement", "checkpointing-not-applied"),
    ("base-unquantised", "fsdp2", "engagement", "base-not-quantised"),
]
QUICK = {
    "data-same-shard", "image-tokens-masked", "packing-leak", "evaluated-with-stale-copy", "accum-last-unreduced",
    "dropout-redrawn", "clip-local-norm", "master-bf16", "optimizer-bf16-state", "muon-of-a-shard",
    "lr-steps-per-process", "overflow-not-shared", "resume-average-lost", "merge-wrong", "silent-ddp",
    "checkpointing-off", "base-unquantised",
}  # fmt: skip
"""Some of every stage. The kill matrix, which is slow, has every fault under every strategy."""


@pytest.mark.parametrize(
    ("fault", "strategy", "stage", "diagnosis"),
    [row if row[0] in QUICK else pytest.param(*row, marks=pytest.mark.nightly) for row in FOUND],
)
def test_a_fault_is_found_and_named(
    fault: str,
    strategy: str,
    stage: str,
    diagnosis: str,
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
    assert outcome.diagnosis.id == diagnosis
    assert diagnosis in fault_class(fault).diagnoses


def test_a_fault_that_is_never_reached_is_an_error(
    recipe: Callable[..., Resolved], monkeypatch: pytest.MonkeyPatch, lone_group: WorkerGroup
) -> None:
    monkeypatch.setattr(run, "run_pass", lambda *_: Pass("logic", fault_reached=False))
    with pytest.raises(RunFailed, match="never runs the code"):
        verify(recipe("single"), group=lone_group, fault="clip-ignored")


def test_a_model_that_fails_by_itself_is_one_message(recipe: Callable[..., Resolved], group: WorkerGroup) -> None:
    """MiniMax (transformers 5.23.0) multiplies its float32 decays with states in the 16 bits of a copy of weights."""
    with pytest.raises(RunFailed, match=r"in the plain loop, before any strategy: RuntimeError: .*modeling_minimax"):
        verify(recipe("zero1", precision="bf16", model=HYBRIDS["minimax"]), group=group, time_limit=120)


def test_a_fault_of_other_strategies_is_refused(recipe: Callable[..., Resolved]) -> None:
    with pytest.raises(InputError, match="not to this strategy"):
        verify(recipe("single"), fault="silent-ddp")
    with pytest.raises(InputError, match="did you mean clip-ignored"):
        verify(recipe("single"), fault="clip-ignore")


def test_no_comparison_knows_of_faults() -> None:
    """Comparison and diagnosis never read which fault or mutation is running, nor import the faults."""
    from pathlib import Path

    import toolkit.verification as package

    folder = Path(package.__path__[0])
    files = [folder / "passes.py", *(folder / "compare").glob("*.py"), *(folder / "diagnose").glob("*.py")]
    assert len(files) > 15
    for file in files:
        text = file.read_text(encoding="utf-8")
        for word in ("verification.faults", "case.fault", ".mutation", *(f'"{fault}"' for fault in faults())):
            assert word not in text, f"{file.name}: {word}"


def test_every_fault_names_diagnoses_that_exist() -> None:
    assert {name for kind in faults().values() for name in kind.diagnoses} <= set(known())
    assert all(kind.diagnoses and kind.stages for kind in faults().values())


@pytest.mark.weekly
@pytest.mark.timeout(7200)  # about 400 verdicts of 3 to 6 s each, twice that on a busy machine
def test_every_fault_is_killed(
    recipe: Callable[..., Resolved], group: WorkerGroup, lone_group: WorkerGroup, four: WorkerGroup
) -> None:
    messages: list[str] = []
    groups = {1: lone_group, 2: group, 4: four}
    cells = kill_matrix(recipe("ddp"), None, 120, messages.append, groups=groups | {-n: g for n, g in groups.items()})
    assert len(cells) > 150
    assert not [line for line, cell in zip(messages, cells, strict=True) if not (cell.killed and cell.named)]


def test_a_run_that_ends_for_another_reason_has_killed_nothing(
    recipe: Callable[..., Resolved], monkeypatch: pytest.MonkeyPatch
) -> None:
    def died(resolved: Resolved, **_: object) -> Outcome:
        return Outcome(resolved, resolved, [Pass("logic", failure="rank 0 died (exit code -6): SIGABRT")])

    monkeypatch.setattr(matrix, "verify", died)
    said: list[str] = []
    [cell] = kill_matrix(recipe("single"), ["clip-ignored"], 120, said.append, ["single"])
    assert not cell.killed
    assert "MISSED" in said[0]
    assert "rank 0 died (exit code -6): SIGABRT; expected: clip" in said[0]


@pytest.mark.usefixtures("launches")
def test_a_run_that_hangs_or_dies_is_reported_with_its_place(recipe: Callable[..., Resolved]) -> None:
    with WorkerGroup(1) as workers:
        outcome = verify(recipe("single"), group=workers, time_limit=0.05)
        assert (outcome.verdict, outcome.exit_code) == ("failed-to-start", 1)
        assert outcome.failure is not None
        assert outcome.failure.startswith("rank 0, before the first step: no answer")
        assert not workers._processes, "nothing is left behind"


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (broken.raises, "the device is on fire"),
        (broken.dies, "exit code 9"),
        (broken.aborts, 'SIGABRT (the heap is broken; in File "'),
        pytest.param(broken.hangs, "no answer", marks=pytest.mark.nightly),  # it takes the whole of its limit
    ],
)
@pytest.mark.usefixtures("launches")
def test_a_rank_that_breaks_is_reported_with_its_step_and_stage(
    job: Callable[[Case], None], message: str, recipe: Callable[..., Resolved], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "run_case", job)
    with WorkerGroup(2) as workers:
        workers.run(os.getpid)  # the start is not what is timed
        processes = [process.pid for process in workers._processes]
        outcome = verify(recipe("ddp"), group=workers, time_limit=45, round_trip=False)
    assert (outcome.verdict, outcome.exit_code) == ("different", 1)
    assert outcome.failure is not None
    assert message in outcome.failure
    # Two micro-batches were done, of three in a step. Who waits for a rank that hangs does not answer either.
    assert re.match(r"rank [01], step 1, (forward of micro-batch 2|backward)", outcome.failure)
    assert not any(psutil.pid_exists(pid) for pid in processes if pid), "nothing is left behind"


@pytest.mark.usefixtures("launches")
def test_an_export_that_breaks_is_reported_as_that_and_the_log_says_where(
    recipe: Callable[..., Resolved], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(passes, "resume_case", broken.breaks_where_it_exports)
    with WorkerGroup(1) as workers:
        outcome = verify(recipe("single"), group=workers, time_limit=60, folder=tmp_path)
    assert outcome.failure == "rank 0, step 3, exporting the checkpoint: RuntimeError: the device is on fire"
    log = (tmp_path / "logic-rank0.log").read_text()
    assert "Traceback" in log
    assert "in _raise" in log


def test_a_loss_that_is_not_a_number_is_reported(recipe: Callable[..., Resolved], lone_group: WorkerGroup) -> None:
    resolved = recipe("single", optimizer={"lr": 1e30}, schedule={"warmup_steps": 0})
    outcome = verify(resolved, group=lone_group, time_limit=60, stop_early=True)
    assert (outcome.verdict, outcome.exit_code) == ("different", 1)
    assert outcome.difference is not None
    assert (outcome.difference[1].name, outcome.difference[2].step) == ("forward", 1)
    assert outcome.diagnosis is not None
    assert outcome.diagnosis.id == "recipe-diverges"


def test_a_gradient_that_is_not_finite_in_the_plain_loop_either_is_no_fault_of_the_strategy(
    recipe: Callable[..., Resolved], lone_group: WorkerGroup
) -> None:
    # Padding's row of the embedding is zero, and behind the window a padding token sees padding alone.
    config, _ = model_types.small_config("gemma3n_text", "AutoModelForCausalLM")
    config |= {"sliding_window": 2, "layer_types": ["sliding_attention"] * 2}
    resolved = recipe("single", model={"config": config}, adapter={"method": "lora", "r": 2, "alpha": 8})
    outcome = verify(resolved, group=lone_group, time_limit=60, stop_early=True)
    assert (outcome.verdict, outcome.exit_code) == ("different", 1)
    assert outcome.diagnosis is not None
    assert outcome.diagnosis.id == "plain-gradient-not-finite"
