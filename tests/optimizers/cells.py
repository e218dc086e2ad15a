"""The cells of the table: one recipe for each optimizer and strategy, and what `verify` says about it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.optimizers import optimizer_names
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve, strategies
from toolkit.verification.outcome import Outcome
from toolkit.verification.run import verify

MODEL: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300, "tie_word_embeddings": False,
    "attention_dropout": 0.1,
}  # fmt: skip
# Far enough from 0 that the change of a float32 weight is above its rounding.
SCHEDULES = {"schedule-free": {"name": "constant", "warmup_steps": 2}}
RATES = {"sgd": 0.1, "muon": 1.0e-3, "lion": 1.0e-4, "adafactor": 1.0e-2}


@dataclass(frozen=True)
class Cell:
    optimizer: str
    strategy: str
    precision: str = "bf16"

    def resolved(self) -> Resolved:
        """The recipe; raises InputError where the strategy does not support the optimizer."""
        section: dict[str, Any] = {"name": self.optimizer, "lr": RATES.get(self.optimizer, 1.0e-3), "weight_decay": 0.1}
        values = {
            "model": {"config": MODEL},
            "tokenizer": {"path": "none"},
            "data": {"train": "none", "max_length": 48},
            "batch": {"micro_size": 2, "accumulation": 3},
            "optimizer": section,
            "schedule": SCHEDULES.get(self.optimizer, {"name": "cosine", "warmup_steps": 2}),
            "precision": self.precision,
            "strategy": {"name": self.strategy},
            "machine": {"device": "cpu", "processes": 1 if self.strategy == "single" else 2},
            "run": {"max_steps": 4, "seed": 3},
        }
        return resolve(Recipe.model_validate(values), "recipe", device="cpu")


def cells() -> list[Cell]:
    """Every optimizer under every strategy."""
    return [Cell(name, strategy) for name in optimizer_names() for strategy in strategies()]


@contextlib.contextmanager
def groups() -> Iterator[Callable[[Cell], WorkerGroup]]:
    """One process and two, started once for all cells."""
    with WorkerGroup(1, 1) as one, WorkerGroup(2, 1) as two:
        yield lambda cell: one if cell.strategy == "single" else two


def judge(cell: Cell, group: WorkerGroup) -> tuple[str, Outcome | None]:
    """The verdict in a word, and the outcome unless the recipe is refused."""
    try:
        resolved = cell.resolved()
    except InputError:
        return "refused", None
    outcome = verify(resolved, group=group, time_limit=300)
    return outcome.verdict, outcome


def limits(outcome: Outcome) -> dict[str, float]:
    """The detection limits of the update and of the state, in float32."""
    found = {stage.name: stage.detection_limit for stage in outcome.passes[0].stages}
    return {name: limit for name in ("update", "optimizer-state") if (limit := found.get(name)) is not None}


def root() -> Path:
    return Path(__file__).parents[2]
