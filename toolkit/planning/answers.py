"""What `toolkit plan` is asked beyond the candidates: ``--fit``, ``--explain``, ``--price``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from toolkit.errors import InputError
from toolkit.planning.candidate import Candidate
from toolkit.planning.hardware import Device
from toolkit.planning.questions import Answer, Explanation, answer, cost, explain
from toolkit.planning.search import Search


@dataclass(frozen=True)
class Answers:
    """``costs``: of the chosen candidate, where a price is known; of the ``run`` where its steps are."""

    fit: list[Answer] = field(default_factory=list)
    explanation: Explanation | None = None
    costs: dict[str, float] | None = None

    def to_json(self) -> dict[str, Any]:
        """Keys of the command's JSON."""
        return {
            "fit": [one.to_json() for one in self.fit],
            "explain": None if self.explanation is None else self.explanation.to_json(),
            "cost": self.costs,
        }

    def lines(self) -> list[str]:
        """All of it as it is printed."""
        lines = [] if self.explanation is None else ["", *self.explanation.lines()]
        for one in self.fit:
            lines += ["", f"fit {one.question}: {one.text}" + (f"  ({one.change})" if one.change else "")]
        if self.costs is not None:
            per = self.costs
            run = f", {per['run']:.4g} for the run" if "run" in per else ""
            lines += ["", f"cost of the chosen: {per['step']:.4g} a step, {per['million_tokens']:.4g} for a million "
                          f"tokens{run}"]  # fmt: skip
        return lines


def prices_of(given: Sequence[str], device: str, table: dict[str, Device]) -> dict[str, float]:
    """``2.5`` (of ``device``) and ``NAME=2.5`` as prices of a device's hour, by name. Raises InputError."""
    prices: dict[str, float] = {}
    for text in given:
        name, _, number = text.rpartition("=")
        name = name.lower() or device
        try:
            prices[name] = float(number)
        except ValueError:
            raise InputError(f"--price {text}: a number, or NAME=NUMBER, for an hour of one device") from None
        if not 0 < prices[name] < float("inf"):
            raise InputError(f"--price {text}: must be above 0")
        if name not in table and name != device:
            raise InputError(f"--price {text}: {name} is not in the table of devices: {', '.join(table)}")
    return prices


def answers(
    search: Search,
    chosen: Candidate | None,
    fit: Sequence[str],
    explained: bool,
    given: Sequence[str],
    table: dict[str, Device],
) -> Answers:
    """Everything that was asked. Raises InputError."""
    prices = prices_of(given, search.device.name, table)
    costs = None
    paid = None if chosen is None else cost(chosen, prices.get(search.device.name))
    if paid is not None and chosen is not None:
        recipe = search.asked.recipe
        tokens = search.asked.global_size * recipe.data.max_length
        costs = {"step": paid, "million_tokens": paid / tokens * 1e6}
        if recipe.run.max_steps is not None:
            costs["run"] = paid * recipe.run.max_steps
    found = [answer(question, search, list(table.values()), prices) for question in fit]
    return Answers(found, explain(search) if explained else None, costs)
