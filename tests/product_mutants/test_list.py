"""The list of product mutants: a change that moves a mutant's text away is noticed here, and not weeks later."""

from __future__ import annotations

from pathlib import Path

import pytest

from product_mutants.catalogue import Mutant, Place, find, mutated, problems, read_mutants, read_sources
from product_mutants.covered import Map, digest, guess

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


TEXT = "def f(x):\n    return g(\n        x,\n        1,\n    )\n\n\ndef g(x, y):\n    return x + y\n"


def test_tests_of_a_line_are_those_of_its_statement_the_fastest_first() -> None:
    tests = [(name, float(seconds)) for seconds, name in enumerate("abcdefgh", 1)]
    known = Map(tests, {"x.py": {2: [7, 2, 1, 4, 3], 9: [0]}}, {"x.py": digest(TEXT)})
    assert known.tests_of(Place("x.py", 4, 4), TEXT, 1000) == ["b", "c", "d", "e", "h"]
    assert known.tests_of(Place("x.py", 4, 4), TEXT, 9) == ["b", "c", "d"], "2, 3 and 4 seconds"
    every = ["a", "b", "c", "d", "e", "h"]
    assert known.tests_of(Place("x.py", 9, 9), TEXT, 1000) == every, "one is few: the others of the module follow"
    assert known.tests_of(Place("x.py", 4, 4), f"\n{TEXT}", 1000) == every, "lines have moved"
    assert known.tests_of(Place("y.py", 1, 1), TEXT, 1000) == []


def test_without_a_map_they_are_guessed_from_imports(tmp_path: Path) -> None:
    files = {
        "helper.py": "from toolkit.data import order\n",
        "test_direct.py": "def test():\n    from toolkit.data.order import deal\n",
        "test_helped.py": "from helper import something\n",
        "test_near.py": "import toolkit.data.loader\n",
        "test_other.py": "import toolkit.optim.sgd\n",
    }
    (tmp_path / "tests").mkdir()
    for name, text in files.items():
        (tmp_path / "tests" / name).write_text(text)
    found = guess(Place("toolkit/data/order.py", 1, 1), tmp_path)
    assert found == ["tests/test_direct.py", "tests/test_helped.py", "tests/test_near.py"]
