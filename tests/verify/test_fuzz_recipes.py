"""The fuzzer itself, and a short part of what it does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from families import EVERY_FAMILY
from fuzz_recipes import __main__ as fuzzer
from fuzz_recipes import judge as judging
from fuzz_recipes.draw import STRATEGIES, draw_recipe
from fuzz_recipes.judge import Groups, Judged, judge, shrink
from fuzz_recipes.known import KNOWN
from nights import nightly_but
from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve


class _Shared(Groups):
    """The groups that all tests share."""

    def __init__(self, *groups: WorkerGroup) -> None:
        self.by_size = {group.size: group for group in groups}

    def of(self, size: int) -> WorkerGroup:
        return self.by_size[size]


def test_recipes_are_of_every_kind_and_mostly_sound() -> None:
    drawn = [draw_recipe(seed) for seed in range(3 * len(EVERY_FAMILY))]
    assert drawn == [draw_recipe(seed) for seed in range(3 * len(EVERY_FAMILY))]
    assert len({family for family, _ in drawn}) == len(EVERY_FAMILY) >= 24
    assert {recipe["strategy"]["name"] for _, recipe in drawn} == set(STRATEGIES)
    refused = 0
    for _, recipe in drawn:
        try:
            resolve(Recipe.model_validate(recipe), "recipe", device="cpu")
        except InputError:
            refused += 1
    assert 0 < refused < len(drawn) / 3


def test_later_seeds_have_meshes_and_earlier_ones_are_what_they_were() -> None:
    later = [draw_recipe(seed)[1] for seed in range(42000, 42100)]
    axes = [axis for recipe in later for axis in recipe["strategy"].get("mesh", ())]
    assert {"context", "tensor"} == set(axes)
    assert any(recipe["optimizer"].get("name") == "schedule-free" for recipe in later)
    assert not any("mesh" in draw_recipe(seed)[1]["strategy"] for seed in range(41900, 42000))


# 40109: the step that overflows had the norm from which the limit of clipping was chosen.
@pytest.mark.parametrize("seed", nightly_but([3, 19, 40109], 40109))
def test_a_random_recipe_is_equivalent(seed: int, group: WorkerGroup, lone_group: WorkerGroup) -> None:
    family, recipe = draw_recipe(seed)
    judged = judge(seed, family, recipe, _Shared(group, lone_group), time_limit=120)
    assert judged.verdict == "equivalent", judged


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [42485, 42588, 42631, 42740, 43021, 43190])
def test_what_was_called_different_once_is_equivalent(seed: int, group: WorkerGroup, lone_group: WorkerGroup) -> None:
    family, recipe = draw_recipe(seed)
    judged = judge(seed, family, recipe, _Shared(group, lone_group), time_limit=120)
    assert judged.verdict == "equivalent", judged


def test_what_fails_is_reported_noted_and_made_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every recipe with packing is wrong here, all else is right: packing is what the smaller recipe keeps."""

    def wrong_with_packing(seed: int, recipe: dict[str, Any], groups: Groups, limit: float) -> tuple[str, str, str]:
        asked.append(seed)
        found = recipe["data"].get("packing", False)
        return ("different", "logic/gradient", "too large") if found else ("equivalent", "", "")

    asked: list[int] = []
    monkeypatch.setattr(judging, "_verdict", wrong_with_packing)
    results = tmp_path / "results.jsonl"
    arguments = ["--results", str(results), "--seed", "0", "--count", "60"]
    assert fuzzer.main(arguments) == 1
    output = capsys.readouterr().out
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert [line["seed"] for line in lines] == asked == list(range(60))
    failed = [line for line in lines if line["verdict"] == "different"]
    assert failed
    assert f"unexplained: {len(failed)}" in output
    assert f"toolkit verify {tmp_path}/recipe-{failed[0]['seed']}.yaml" in output
    again = Recipe.model_validate(json.loads((tmp_path / f"recipe-{failed[0]['seed']}.yaml").read_text()))
    assert again.data.packing

    # Nothing is done twice; a line that was cut off is done again.
    asked.clear()
    results.write_text(results.read_text() + '{"seed": 60, "fam')
    assert fuzzer.main([*arguments[:-1], "61"]) == 1
    assert asked == [60]

    family, recipe = draw_recipe(failed[0]["seed"])
    judged = Judged(failed[0]["seed"], family, "different", "logic/gradient", "too large", 0.0, recipe)
    smaller = shrink(judged, Groups(), time_limit=1, budget=60).recipe
    assert smaller["data"]["packing"]
    assert (smaller["activation_checkpointing"], smaller["adapter"], smaller["precision"]) == ("none", None, "fp32")


def test_a_refusal_has_a_reason_and_a_crash_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    _, recipe = draw_recipe(3)
    judged = judge(1, "any", recipe | {"data": {"train": "x", "packing": True, "group_by_length": True}}, Groups())
    assert judged.verdict == "refused"
    assert "packed rows" in judged.why
    monkeypatch.setattr(judging, "resolve", lambda *arguments, **options: 1 / 0)
    judged = judge(1, "any", recipe, Groups())
    assert (judged.verdict, judged.explained) == ("crashed", False)
    assert "ZeroDivisionError" in judged.why


def test_what_is_known_has_a_reason() -> None:
    for known in KNOWN:
        assert len(known.reason) > 40
