"""One pass: a case run by the workers, replayed by the plain loop, compared stage by stage."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from toolkit.launch.failure import last_words
from toolkit.launch.group import JobFailed, WorkerGroup
from toolkit.rooms import asked_options
from toolkit.strategies.engines.claims import Claim
from toolkit.terminal import Say
from toolkit.threads import torch_threads
from toolkit.verification.cases.case import Case
from toolkit.verification.cases.conversations import DataCase
from toolkit.verification.compare.across import cross_rank, round_trip
from toolkit.verification.compare.backward import Replayed, forward, gradient, replay
from toolkit.verification.compare.data import data_stage
from toolkit.verification.compare.engagement import engagement
from toolkit.verification.compare.evaluation import evaluation
from toolkit.verification.compare.ledger import ledger
from toolkit.verification.compare.measure import Measure, Stage, differences
from toolkit.verification.compare.replay import Reference
from toolkit.verification.compare.step import optimizer_stages
from toolkit.verification.record.samples import record_data
from toolkit.verification.record.trace import RankTrace, load_traces, share_rates
from toolkit.verification.record.tracer import FIRST
from toolkit.verification.record.worker import resume_case, run_case


@dataclass
class Pass:
    """What one pass found. ``failure``: why the run did not get to its end, where it did not. ``started``: a failed
    run had a first loss."""

    name: str
    stages: list[Stage] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    failure: str | None = None
    started: bool = True
    not_engaged: bool = False
    seconds: float = 0.0
    ranks: list[RankTrace] = field(default_factory=list)
    replayed: Replayed | None = None
    reference: Reference | None = None
    why_measured: str | None = None
    """Of a recording, which has no reference: why its tolerances are measured."""
    fault_reached: bool = False

    @property
    def parts(self) -> list[RankTrace]:
        """One rank of each data-parallel part, by data-parallel rank."""
        assert self.reference is not None
        return [self.ranks[rank] for rank in self.reference.resolved.part_ranks]

    @property
    def different(self) -> tuple[Stage, Measure] | None:
        return next(iter(self.differences), None)

    @property
    def differences(self) -> list[tuple[Stage, Measure]]:
        """Every stage that fails, the first difference first."""
        return differences(self.stages)

    @property
    def unproven(self) -> list[Claim]:
        return [claim for claim in self.claims if not claim.ok]

    @property
    def measured_because(self) -> str | None:
        """Why tolerances are measured; None where only the order of sums may differ, which has a bound."""
        return self.reference.measured_because if self.reference else self.why_measured

    def to_json(self) -> dict[str, Any]:
        compared = self.reference is not None or bool(self.stages)
        return {
            "pass": self.name,
            "seconds": round(self.seconds, 2),
            "failure": self.failure,
            "tolerance": None if not compared else "measured" if self.measured_because else "bound",
            "measured_because": self.measured_because,
            "stages": [stage.to_json() for stage in self.stages],
        }


def run_pass(
    case: Case,
    group: WorkerGroup,
    fresh: WorkerGroup,
    timeout: float,
    data: DataCase | None = None,
    say: Say = lambda text: None,
) -> Pass:
    """Run and compare one case: trained in ``group``, loaded again and resumed in ``fresh``. ``data``: what else the
    ranks make samples of, if the recipe has conversations or several sources. ``say`` is told each stage as it ends.

    Raises InputError where the recipe cannot be used; nothing else is raised for what a candidate does: a crash, a
    hang and NaN are findings.
    """
    started = time.perf_counter()
    found = Pass(case.pass_name)
    try:
        say(f"{case.pass_name} pass: the recipe's loop on {group.size} process{'es' * (group.size > 1)}")
        group.run(run_case, case, timeout=timeout)
        found.ranks = load_traces(case.folder, group.size)
        if case.resolved().mesh.pipeline > 1:
            share_rates(found.ranks)
        found.fault_reached = any(rank.fault_reached for rank in found.ranks)
        failed = next((rank for rank in found.ranks if rank.failure), None)
        if failed is not None:
            found.not_engaged = True
            name = case.recipe["strategy"]["name"]
            found.claims = failed.claims or [Claim("strategy", f"{name} active", "yes", failed.failure or "", False)]
        elif case.round_trip:
            with _resumed(case, fresh, timeout, found):
                compare(case, found, group.threads, say)  # on this process's core, while the others resume
            _compare_round_trip(case, found)
            _tell(found, found.stages[-1], say)
        else:
            compare(case, found, group.threads, say)
        if data is not None:
            trace = group.run(record_data, data, timeout=timeout)[0]
            found.fault_reached = found.fault_reached or trace.fault_reached
            found.stages.insert(0, data_stage(data, trace))
            if data.conversations:
                why = f", refused: {next(iter(trace.refused.values()))}" if trace.refused else ""
                seen = f"{len(trace.samples)}{why if not trace.samples else ''}"
                found.claims.append(Claim("conversations", "conversations", "1 or more", seen, bool(trace.samples)))
    except JobFailed as error:
        if error.refused is not None:
            raise error.refused from None
        found.failure, found.started = _why_failed(case, error)
        with (case.folder / f"rank{error.rank}.log").open("a", encoding="utf-8") as log:
            log.write(f"{error}\n")
        found.fault_reached = True
    found.seconds = time.perf_counter() - started
    return found


@contextlib.contextmanager
def _resumed(case: Case, fresh: WorkerGroup, timeout: float, found: Pass) -> Iterator[None]:
    """Resume in ``fresh`` meanwhile; afterwards ``found.ranks`` have what was seen."""
    fresh.begin(resume_case, case)
    try:
        yield
    finally:
        fresh.finish(timeout)
    for rank, whole in zip(found.ranks, load_traces(case.folder, fresh.size), strict=True):
        rank.resumed, rank.exported = whole.resumed, whole.exported
        found.fault_reached = found.fault_reached or whole.fault_reached


def compare(case: Case, found: Pass, threads: int, say: Say = lambda text: None) -> None:
    """Fill in the stages of the run itself and the evidence, from the traces. ``threads``: of each rank; torch adds up
    by threads (the bias gradient of a LayerNorm, the decompositions that some adapters start from), so the plain loop
    has as many."""
    say(f"{case.pass_name} pass: a plain loop")
    with torch_threads(threads):
        reference = found.reference = Reference(case)
        resolved, ranks = reference.resolved, found.ranks
        replayed = found.replayed = replay(ranks, reference, case.overflow_step)
        evaluated = evaluation(ranks, reference, bool(replayed.bounds))
    for stage in _stages(case, found, reference, replayed, evaluated):
        found.stages.append(stage)
        _tell(found, stage, say)
    found.claims = engagement(ranks, case, resolved, reference, found.stages)


def _stages(
    case: Case, found: Pass, reference: Reference, replayed: Replayed, evaluated: list[Measure]
) -> Iterator[Stage]:
    resolved, ranks = reference.resolved, found.ranks
    yield ledger(ranks, reference.windows, resolved)
    # Within compiled code no product is seen: they are counted, and the whole model is compared.
    watched = () if resolved.recipe.compile else asked_options(resolved.recipe)
    yield from (stage for option, _ in watched if (stage := option.stage(ranks)) is not None)
    outputs = forward(found.parts, reference, replayed)
    outputs.measures += evaluated
    yield outputs
    yield gradient(ranks, reference.noise, replayed, case.overflow_step)
    matrices = reference.loop.matrices
    yield from optimizer_stages(ranks, resolved, reference.decayed, case.steps, case.overflow_step, matrices=matrices)
    yield cross_rank(ranks)


def _tell(found: Pass, stage: Stage, say: Say) -> None:
    say(f"{found.name} pass: {stage.name} {'ok' if stage.ok else 'FAIL'}")


def _compare_round_trip(case: Case, found: Pass) -> None:
    assert found.reference is not None
    resolved = found.reference.resolved
    limit = next(stage.detection_limit for stage in found.stages if stage.name == "gradient") or 0.0
    exact = resolved.device == "cpu" and not (resolved.traits.rearranges_sums and resolved.token_parts > 2)
    tolerance, recipe = 0.0 if exact else limit, resolved.recipe
    stage = round_trip(found.parts, found.reference.windows, recipe.model.task, tolerance, recipe.optimizer)
    if tolerance:  # the largest of all tensors' serves each of them
        chance = found.reference.noise.chance
        stage.measures = [replace(m, chance=chance) if m.tolerance == tolerance else m for m in stage.measures]
    found.stages.append(stage)


def _why_failed(case: Case, error: JobFailed) -> tuple[str, bool]:
    """Rank, step and the last stage that it reached, then the reason; and whether that is behind a first loss."""
    at = case.folder / f"rank{error.rank}.at"
    place, started = f"rank {error.rank}", False
    if at.exists():
        step, _, stage = at.read_text(encoding="utf-8").partition(" ")
        place += f", step {int(step) + 1}, {stage}"
        started = (int(step), stage) != (0, FIRST)
    else:
        place += ", before the first step"
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    why = f"{lines[-1].strip() if lines else error}{last_words(case.folder / f'rank{error.rank}.log')}"
    return f"{place}: {why}", started
