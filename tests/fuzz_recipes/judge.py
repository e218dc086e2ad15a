"""One recipe to its verdict, in process groups that are kept; and a failing recipe to a smaller one."""

from __future__ import annotations

import copy
import os
import re
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fuzz_recipes.known import known_reason
from toolkit.errors import InputError, ToolkitError
from toolkit.launch.group import WorkerGroup
from toolkit.launch.job import check_machine
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve
from toolkit.verification.outcome import Outcome
from toolkit.verification.run import verify

EXPLAINED = ("equivalent", "refused", "known")


@dataclass
class Judged:
    """What became of one recipe. ``verdict``: equivalent, different, not-exercised, refused (exit 2 with a reason),
    crashed, or known (a difference that ``known.py`` explains). ``stage``: the first that differs. ``why``: a line."""

    seed: int
    family: str
    verdict: str
    stage: str
    why: str
    seconds: float
    recipe: dict[str, Any]

    @property
    def explained(self) -> bool:
        return self.verdict in EXPLAINED

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Groups:
    """Process groups by their size, started at first use and renewed now and then."""

    RENEWED_AFTER = 60
    """Jobs after which a group is started again: what leaks in long-lived processes shall not fill the machine."""

    def __init__(self, log: Path | None = None) -> None:
        self._log = log
        self._groups: dict[int, WorkerGroup] = {}
        self._jobs: dict[int, int] = {}

    def of(self, size: int) -> WorkerGroup:
        self._jobs[size] = self._jobs.get(size, 0) + 1
        if size in self._groups and self._jobs[size] % self.RENEWED_AFTER == 0:
            self._groups[size].close()
        return self._groups.setdefault(size, WorkerGroup(size, log=self._log))

    def close(self) -> None:
        for group in self._groups.values():
            group.close()


def judge(seed: int, family: str, recipe: dict[str, Any], groups: Groups, time_limit: float = 300.0) -> Judged:
    """Verify a recipe; never raises for what the recipe does."""
    started = time.perf_counter()
    verdict, stage, why = _verdict(seed, recipe, groups, time_limit)
    if verdict in ("different", "not-exercised") and (reason := known_reason(family, recipe, stage, why)):
        verdict, why = "known", f"{reason}: {why}"
    return Judged(seed, family, verdict, stage, why, round(time.perf_counter() - started, 1), recipe)


def _verdict(seed: int, recipe: dict[str, Any], groups: Groups, time_limit: float) -> tuple[str, str, str]:
    try:
        resolved = resolve(Recipe.model_validate(recipe), "recipe", device="cpu")
        check_machine(resolved)
        # Every third also saves, loads in other steps of the same processes, resumes and exports.
        outcome = verify(resolved, group=groups.of(resolved.world_size), time_limit=time_limit,
                         round_trip=seed % 3 == 0, stop_early=True)  # fmt: skip
    except InputError as error:
        return "refused", "", str(error).splitlines()[0]
    except ValidationError as error:
        return "refused", "", str(error.errors()[0]["msg"])
    except ToolkitError as error:
        return "crashed", "", str(error).splitlines()[0]
    except Exception:
        return "crashed", "", " | ".join(traceback.format_exc().strip().splitlines()[-3:])
    return describe(outcome)


def describe(outcome: Outcome) -> tuple[str, str, str]:
    """Verdict, stage and reason of a verification that came to its end."""
    if outcome.failure:
        return "crashed", "failure", outcome.failure
    cause = f" [{outcome.diagnosis.cause}]" if outcome.diagnosis else ""
    if outcome.verdict == "different" and outcome.difference:
        one, stage, measure = outcome.difference
        message = (
            f"{one.name}, step {measure.step + 1}, {measure.tensor}: {measure.error:.2e}, limit {measure.tolerance:.2e}"
        )
        return "different", f"{one.name}/{stage.name}", f"{message} {measure.sentence}{cause}"
    if outcome.verdict != "equivalent":
        claims = "; ".join(f"{c.claim}: {c.seen}, expected {c.expected}" for c in outcome.unproven)
        return "not-exercised", "engagement", f"{claims}{cause}"
    return "equivalent", "", ""


# ---------------------------------------------------------------------- a smaller recipe that fails alike

_SIMPLER: tuple[tuple[str, str | None, Any], ...] = (
    ("fp8", None, False), ("compile", None, False), ("loss", None, "plain"), ("adapter", None, None),
    ("activation_checkpointing", None, "none"), ("optimizer", None, {}), ("data", "packing", False),
    ("data", "group_by_length", False), ("data", "format", "text"), ("batch", "accumulation", 1),
    ("strategy", "offload", "none"), ("strategy", "reshard_after_forward", True), ("strategy", "name", "ddp"),
    ("precision", None, "fp32"),
)  # fmt: skip


def shrink(judged: Judged, groups: Groups, time_limit: float, budget: float) -> Judged:
    """The recipe with every option at its default that the failure does not need, within ``budget`` seconds."""
    smallest, deadline = judged, time.monotonic() + budget
    for recipe in _simpler(judged.recipe):
        if time.monotonic() > deadline:
            break
        candidate = copy.deepcopy(smallest.recipe)
        section, key, value = recipe
        if key is None:
            candidate[section] = value
        else:
            candidate[section] = candidate.get(section, {}) | {key: value}
        if candidate == smallest.recipe:
            continue
        found = judge(judged.seed, judged.family, candidate, groups, time_limit)
        if (found.verdict, found.stage) == (judged.verdict, judged.stage):
            smallest = found
    return smallest


def _simpler(recipe: dict[str, Any]) -> Iterator[tuple[str, str | None, Any]]:
    for section, key, value in _SIMPLER:
        if section == "strategy" and key == "name" and recipe["strategy"]["name"] in ("single", "ddp"):
            continue
        if section == "data" and key == "format" and recipe["model"].get("task") == "seq2seq-lm":
            continue
        yield section, key, value


def quiet() -> None:
    """One thread and no network: many recipes run beside other work."""
    import torch

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)


def one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()
