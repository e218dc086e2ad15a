"""The data stage: conversations of every template are learned by the rule, mixtures are exact, mistakes are found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cases import every_case
from data import templates
from toolkit.launch.group import WorkerGroup
from toolkit.recipe.resolve import Resolved
from toolkit.verification.cases import conversations
from toolkit.verification.cases.conversations import ROWS, DataCase, data_case
from toolkit.verification.compare.data import data_stage
from toolkit.verification.diagnose.find import _SAMPLES
from toolkit.verification.faults import fault_class
from toolkit.verification.matrix import what_caught
from toolkit.verification.record.samples import record_data
from toolkit.verification.run import verify, with_needs

FAULTS = (
    "header-supervised",
    "turn-end-unlearned",
    "tool-result-supervised",
    "earlier-reasoning-supervised",
    "mixture-with-replacement",
    "mixture-share-off",
)


def case_of(resolved: Resolved, fault: str | None = None, **data: Any) -> DataCase:
    needs = fault_class(fault).needs if fault else {}
    case = data_case(with_needs(with_needs(resolved, needs), {"data": data}), fault)
    assert case is not None
    return case


def test_a_recipe_without_conversations_and_with_one_source_has_no_such_stage(recipe: Callable[..., Resolved]) -> None:
    assert data_case(recipe("single"), None) is None


@every_case("turns", ["auto", "last", "each"])
def test_built_in_conversations_are_learned_by_the_rule(recipe: Callable[..., Resolved], turns: str) -> None:
    case = case_of(recipe("single"), format="messages", train="built-in", turns=turns)
    trace = record_data(case)
    assert {sample.row for sample in trace.samples} == set(range(len(ROWS)))
    stage = data_stage(case, trace)
    assert len(stage.measures) >= 8 * len(ROWS)
    assert stage.wrong == []


@every_case("name", templates.names() or ["none"])
def test_published_templates_are_learned_by_the_rule(
    name: str, recipe: Callable[..., Resolved], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = templates.folder()
    if here is None:
        pytest.skip("TRL's templates are not installed")
    tokenizer = templates.tokenizer_for((here / f"{name}.jinja").read_text())
    for module in ("cases.conversations", "compare.data", "record.samples"):
        monkeypatch.setattr(f"toolkit.verification.{module}.tokenizer_of", lambda values: tokenizer)
    case = case_of(recipe("single"), format="messages", train="built-in")
    trace = record_data(case)
    assert len({sample.row for sample in trace.samples}) >= 3
    assert [(m.tensor, m.sentence) for m in data_stage(case, trace).wrong] == []


@every_case("fault", FAULTS)
def test_a_mistake_is_found_and_named(fault: str, recipe: Callable[..., Resolved]) -> None:
    case = case_of(recipe("single"), fault)
    trace = record_data(case)
    assert trace.fault_reached
    kinds = {measure.kind for measure in data_stage(case, trace).wrong}
    named = next(cause for kind, cause in _SAMPLES.items() if kind in kinds)
    assert named in fault_class(fault).diagnoses
    right = data_stage(case, record_data(case_of(recipe("single"), fault) and DataCase(
        case.recipe, case.source, case.conversations, case.shares)))  # fmt: skip
    assert right.wrong == []


@pytest.mark.parametrize(("fault", "strategy"), [("tool-result-supervised", "single"), ("mixture-share-off", "zero2")])
def test_verify_finds_it(
    fault: str, strategy: str, recipe: Callable[..., Resolved], group: WorkerGroup, lone_group: WorkerGroup
) -> None:
    workers = lone_group if strategy == "single" else group
    outcome = verify(recipe(strategy), group=workers, fault=fault, time_limit=120, stop_early=True, round_trip=False)
    assert (outcome.verdict, what_caught(outcome)[0]) == ("different", "data")
    assert outcome.diagnosis is not None
    assert outcome.diagnosis.id in fault_class(fault).diagnoses


def test_the_recipes_own_template_is_taken(recipe: Callable[..., Resolved], tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(conversations.TEMPLATE.replace("assistant", "model"))
    case = case_of(recipe("single"), format="messages", train="x", chat_template=str(tmp_path / "chat.jinja"))
    assert all("<|im_start|>" in sample.text for sample in record_data(case).samples)


def test_conversations_that_the_template_refuses_are_no_proof(
    recipe: Callable[..., Resolved], lone_group: WorkerGroup, tmp_path: Path
) -> None:
    (tmp_path / "chat.jinja").write_text("{{ raise_exception('not today') }}")
    data = {"format": "messages", "train": "x", "chat_template": str(tmp_path / "chat.jinja")}
    outcome = verify(recipe("single", data=data), group=lone_group, time_limit=120, stop_early=True, round_trip=False)
    assert outcome.verdict == "not-exercised"
    assert "not today" in outcome.unproven[0].seen
