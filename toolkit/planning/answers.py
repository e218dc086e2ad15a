"""What `toolkit plan` is asked beyond the candidates: ``--fit``, ``--explain``, ``--price``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from toolkit.errors import InputError
from toolkit.planning.candidate import Candidate
from toolkit.planning.hardware import Device
from toolkit.planning.questions import Answer, Explanation, answer, cost, explain
from toolkit.planning.search import Search
from toolkit.recipe.positions import read


@dataclass(frozen=True)
class Run:
    """A run over data of ``tokens`` tokens, all of whose rows are full, with the chosen candidate. ``seconds``: None
    without a time; ``least``, ``most``: the ends of its range."""

    tokens: int
    epochs: int
    steps: int
    seconds: float | None = None
    least: float | None = None
    most: float | None = None

    @classmethod
    def of(cls, tokens: int, search: Search, chosen: Candidate | None) -> Run:
        """The last step of an epoch may be shorter, and takes as long here."""
        recipe = search.asked.recipe
        rows = -(-tokens // recipe.data.max_length)
        epochs = recipe.run.epochs or 1
        steps = epochs * -(-rows // search.asked.global_size)
        if chosen is None or chosen.seconds is None:
            return cls(tokens, epochs, steps)
        one = chosen.seconds
        return cls(tokens, epochs, steps, steps * one.total, steps * one.low, steps * one.high)

    def line(self) -> str:
        """As it is printed."""
        times = "one epoch" if self.epochs == 1 else f"{self.epochs} epochs"
        told = f"the run: {times} over {self.tokens:,} tokens in full rows, {self.steps:,} steps"
        if self.seconds is None or self.least is None or self.most is None:
            return told
        return f"{told}: {_long(self.seconds)}, from {_long(self.least)} to {_long(self.most)}"


def _long(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds >= 5400 else f"{seconds / 60:.1f} minutes"


@dataclass(frozen=True)
class Answers:
    """``costs``: of the chosen candidate, where a price is known; of the ``run`` where its steps are. ``run``: how long
    the chosen one takes for ``--tokens``."""

    fit: list[Answer] = field(default_factory=list)
    explanation: Explanation | None = None
    costs: dict[str, float] | None = None
    run: Run | None = None

    def to_json(self) -> dict[str, Any]:
        """Keys of the command's JSON."""
        return {
            "fit": [one.to_json() for one in self.fit],
            "explain": None if self.explanation is None else self.explanation.to_json(),
            "cost": self.costs,
            "run": None if self.run is None else asdict(self.run),
        }

    def lines(self) -> list[str]:
        """All of it as it is printed."""
        lines = [] if self.explanation is None else ["", *self.explanation.lines()]
        for one in self.fit:
            lines += ["", f"fit {one.question}: {one.text}" + (f"  ({one.change})" if one.change else "")]
        if self.run is not None:
            lines += ["", self.run.line()]
        if self.costs is not None:
            per = self.costs
            run = f", {per['run']:.4g} for the run" if "run" in per else ""
            lines += ["", f"cost of the chosen: {per['step']:.4g} a step, {per['million_tokens']:.4g} for a million "
                          f"tokens{run}"]  # fmt: skip
        return lines


def prices_of(given: Sequence[str], device: str, table: dict[str, Device]) -> dict[str, float]:
    """``2.5`` (of ``device``), ``NAME=2.5`` and files of them as prices of a device's hour, by name. Raises
    InputError."""
    prices: dict[str, float] = {}
    for text in [one for each in given for one in _from_file(each)]:
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


def _from_file(text: str) -> list[str]:
    """``text``, or the prices of the YAML file that it names, in its form."""
    if not text.endswith((".yaml", ".yml")):
        return [text]
    value = read(text).value
    if not isinstance(value, dict):
        raise InputError(f"{text}: a mapping of names of devices to prices is expected, for example h100: 2.5")
    return [f"{name}={price}" for name, price in value.items()]


def answers(
    search: Search,
    chosen: Candidate | None,
    fit: Sequence[str],
    explained: bool,
    given: Sequence[str],
    table: dict[str, Device],
    tokens: int | None = None,
) -> Answers:
    """Everything that was asked. Raises InputError."""
    prices = prices_of(given, search.device.name, table)
    costs = None
    run = None if tokens is None else Run.of(tokens, search, chosen)
    paid = None if chosen is None else cost(chosen, prices.get(search.device.name))
    if paid is not None and chosen is not None:
        recipe = search.asked.recipe
        in_step = search.asked.global_size * recipe.data.max_length
        costs = {"step": paid, "million_tokens": paid / in_step * 1e6}
        steps = recipe.run.max_steps if run is None else run.steps
        if steps is not None:
            costs["run"] = paid * steps
    found = [answer(question, search, list(table.values()), prices) for question in fit]
    return Answers(found, explain(search) if explained else None, costs, run)
