"""A table of cases in one test."""

from __future__ import annotations

import functools
import inspect
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest


def every_case(
    names: str | Sequence[str], cases: Iterable[Any], ids: Iterable[Any] | Callable[[Any], object] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """``pytest.mark.parametrize`` as one test: all cases run, and each one that fails is reported by its name.

    A case has its own ``monkeypatch``, and a copy of ``tmp_path`` as the fixtures have left it, which is the current
    folder if that one was; what other fixtures have made is shared.
    """
    arguments = names.replace(",", " ").split() if isinstance(names, str) else list(names)
    table = dict(_named(arguments, list(cases), ids))

    def loop_over(test: Callable[..., None]) -> Callable[..., None]:
        fixtures = [name for name in inspect.signature(test).parameters if name not in arguments]

        @functools.wraps(test)
        def loop(*instance: object, subtests: pytest.Subtests, tmp_path: Path, **shared: Any) -> None:
            assert table, "a table without a case"
            left = list(tmp_path.iterdir())
            for number, (name, values) in enumerate(table.items()):
                with subtests.test(name), pytest.MonkeyPatch.context() as monkeypatch:
                    folder = tmp_path / f"case {number}"
                    folder.mkdir()
                    for path in left:
                        (shutil.copytree if path.is_dir() else shutil.copy)(path, folder / path.name)
                    if Path.cwd() == tmp_path:
                        monkeypatch.chdir(folder)
                    if "capsys" in shared:
                        shared["capsys"].readouterr()
                    own = {"tmp_path": folder, "monkeypatch": monkeypatch, "subtests": subtests}
                    given = shared | {name: own[name] for name in own if name in fixtures}
                    test(*instance, **dict(zip(arguments, values, strict=True)), **given)

        needed = dict.fromkeys([*fixtures, "subtests", "tmp_path"])
        loop.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in needed]
        )
        return loop

    return loop_over


def _named(arguments: list[str], cases: list[Any], ids: Any) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Every case with a name that no other has, chosen as pytest's."""
    given = list(ids) if ids is not None and not callable(ids) else None
    assert given is None or len(given) == len(cases)
    seen: set[str] = set()
    for number, case in enumerate(cases):
        is_param = hasattr(case, "marks")
        assert not (is_param and case.marks), "marks belong to the test, not to a case"
        values = tuple(case.values) if is_param else (tuple(case) if len(arguments) > 1 else (case,))
        if is_param and case.id is not None:
            name = case.id
        elif given is not None:
            name = str(given[number])
        else:
            name = "-".join(
                _plain(value, f"{argument}{number}", ids) for argument, value in zip(arguments, values, strict=True)
            )
        if name in seen:
            name = f"{name} ({number})"
        seen.add(name)
        yield name, values


def _plain(value: object, otherwise: str, ids: Callable[[Any], object] | None) -> str:
    if ids is not None and (chosen := ids(value)) is not None:
        return str(chosen)
    if isinstance(value, str | int | float | bool | None):
        return str(value)
    return getattr(value, "__name__", otherwise)
