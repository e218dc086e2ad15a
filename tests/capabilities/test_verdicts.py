"""Every option that README and the docs name, equal to the plain loop under every strategy: three to six options in a
row, each row under a strategy of each family by default and under all others at night.

A verdict names the first stage and tensor that differ, which tells the options of a row apart; that each of them was at
work is what `Option.seen` asks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from capabilities.options import FAMILY_OF, OPTIONS, ROWS, STRATEGIES, Row
from tiny import recipe_dict
from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve
from toolkit.verification.compare.measure import STAGES
from toolkit.verification.run import verify


def resolved(sections: dict[str, Any], strategy: str) -> Resolved:
    """Raises InputError where the strategy cannot have these options together."""
    values = recipe_dict(
        Path("nowhere"),
        machine={"processes": 1 if strategy == "single" else 2},
        batch={"accumulation": 3},
        **{key: value for key, value in sections.items() if key not in ("batch", "strategy")},
    )
    values["batch"] |= sections.get("batch", {})
    values["strategy"] = {"name": strategy} | sections.get("strategy", {})
    return resolve(Recipe.model_validate(values), "recipe", device="cpu")


def cells() -> list[Any]:
    return [
        pytest.param(
            row,
            strategy,
            id=f"{row.name} under {strategy}",
            # The plain loop of a row is computed once where its strategies follow each other in one pool.
            marks=[pytest.mark.xdist_group(row.name), *([] if strategy in row.default else [pytest.mark.nightly])],
        )
        for row in ROWS
        for strategy in STRATEGIES
        if not refusals(row, strategy)
    ]


def refusals(row: Row, strategy: str) -> list[str]:
    """Options of a row that the table says this strategy refuses."""
    return [option for option in row.options if strategy in OPTIONS[option].refused]


@pytest.mark.parametrize(("row", "strategy"), cells())
def test_a_row_is_equal_to_the_plain_loop(row: Row, strategy: str, group: WorkerGroup, lone_group: WorkerGroup) -> None:
    outcome = verify(
        resolved(row.sections(), strategy),
        group=lone_group if strategy == "single" else group,
        time_limit=200,
        passes=("logic", "precision") if row.logic else ("precision",),
        round_trip=row.saved,
    )
    assert outcome.verdict == "equivalent", (
        outcome.difference and outcome.difference[2].sentence, outcome.failure, outcome.unproven,
    )  # fmt: skip
    for one in outcome.passes:
        stages = {stage.name: stage for stage in one.stages}
        assert stages.keys() >= {name for name in STAGES if name not in ("data", "products", "round-trip")}
        assert all(stage.measures for stage in one.stages)
        # A relative error of any one tensor's gradient above 1e-5 is caught, in 16 bits too.
        assert one.measured_because is not None or 0 < (stages["gradient"].detection_limit or 0) < 1e-5
    concerned = [OPTIONS[option] for option in row.options if strategy in OPTIONS[option].concerns]
    assert [option.sections for option in concerned if not option.seen(outcome)] == [], "not at work"


def test_what_is_refused() -> None:
    """A row is refused under the strategies that its options say, with their reasons, and under no others."""
    wrong = {}
    for row in ROWS:
        for strategy in STRATEGIES:
            expected = [OPTIONS[option].refused[strategy] for option in refusals(row, strategy)]
            try:
                resolved(row.sections(), strategy)
                said = ""
            except InputError as error:
                said = str(error)
            if bool(said) != bool(expected) or not any(part in said for part in expected or [""]):
                wrong[row.name, strategy] = said or "accepted"
    assert wrong == {}


def test_every_option_has_a_row_in_each_family_of_strategies() -> None:
    """In the default rows, unless no strategy of the family can have it; and every strategy is in some row."""
    missing = []
    for option, facts in OPTIONS.items():
        rows = [row for row in ROWS if option in row.options]
        assert rows, option
        verified = {FAMILY_OF[strategy] for row in rows for strategy in row.default}
        able = {FAMILY_OF[name] for name in facts.concerns if name not in facts.refused}
        missing += [(option, family) for family in able - verified if not facts.long]
    assert missing == []
    assert {strategy for row in ROWS for strategy in row.default} == set(STRATEGIES)
