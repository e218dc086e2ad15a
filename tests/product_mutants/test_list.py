"""The list of product mutants: a change that moves a mutant's text away is noticed here, and not weeks later."""

from __future__ import annotations

import pytest

from product_mutants.catalogue import Mutant, find, mutated, problems, read_mutants, read_sources

PLANTED = {
    "clip-a-thousandth-low",
    "experts-divided-by-one-too-few",
    "last-group-is-skipped",
    "loader-repeats-a-sample",
    "no-end-token",
    "parts-joined-in-reverse",
    "wrong-slice-of-a-piece",
}


def test_every_mutant_is_in_the_product_once_and_changes_it() -> None:
    mutants, sources = read_mutants(), read_sources()
    assert problems(mutants, sources) == []
    assert len(mutants) >= 120
    assert {mutant.id for mutant in mutants if mutant.planted} == PLANTED
    files = [find(mutant, sources)[0].file for mutant in mutants]
    assert {file for file in files if files.count(file) > 2} == set(), "spread over the product"


@pytest.mark.parametrize("text", ["f(a, b)", "f(\n    a,\n    b,\n)", "f( a,b )", "y = f(a, b) + 1"])
def test_a_text_is_found_however_it_is_formatted(text: str) -> None:
    mutant = Mutant("swap", "x.py", "f(a, b)", "f(b, a)", "")
    assert len(find(mutant, {"x.py": text})) == 1
    assert "f(b, a)" in mutated(mutant, text)


@pytest.mark.parametrize("text", ["g.f(aa, b)", "off(a, b)", "f(a, b.c)", "f(a b)"])
def test_other_names_are_not_taken_for_it(text: str) -> None:
    assert find(Mutant("swap", "x.py", "f(a, b)", "f(b, a)", ""), {"x.py": text}) == []


@pytest.mark.parametrize(
    ("search", "replace", "said"),
    [
        ("x = 1", "x = 2", "occurs 2 times"),
        ("z = 1", "z = 2", "occurs 0 times"),
        ("y = 1", "y = ", "does not parse"),
        ("y = 1", "y  =  1", "the same code"),
    ],
)
def test_useless_entries_are_named(search: str, replace: str, said: str) -> None:
    [problem] = problems([Mutant("m", "x.py", search, replace, "")], {"toolkit/x.py": "x = 1\nx = 1\ny = 1\n"})
    assert problem.startswith("m: ")
    assert said in problem


def test_an_id_names_one_mutant() -> None:
    mutants = [Mutant("m", "x.py", "x = 1", f"x = {value}", "") for value in (2, 3)]
    assert problems(mutants, {"toolkit/x.py": "x = 1\n"}) == ["m: 2 mutants have this id"]
