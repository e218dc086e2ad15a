"""Of an optimizer that averages the weights: the weights of training in the place of the average."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

from toolkit.verification.faults.base import REFRESHED_COPY, Fault, Patch

_SCHEDULE = {"name": "constant", "warmup_ratio": None, "warmup_steps": 1, "min_ratio": None, "power": None,
             "decay_ratio": None, "decay_steps": None, "decay_shape": None}  # fmt: skip


class _Averaging(Fault):
    needs: ClassVar = {"optimizer": {"name": "schedule-free"}, "schedule": _SCHEDULE}

    @classmethod
    def needs_of(cls, resolved: Any) -> dict[str, Any]:
        pure = resolved.recipe.precision == "bf16-pure"
        return cls.needs | ({"precision": "bf16"} if pure else {})


class EvaluatedAtY(_Averaging):
    id = "evaluated-at-y"
    title = "schedule-free is evaluated at the weights that it trains at, not at their average"
    stages = ("forward",)
    diagnoses = ("evaluation-not-at-average",)

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.training import loop

        @self.breaking(patch, loop, "evaluation_weights")
        @contextlib.contextmanager
        def evaluation_weights(right: Any, engine: Any) -> Iterator[None]:
            yield


class EvaluatedWithStaleCopy(_Averaging):
    id = "evaluated-with-stale-copy"
    title = "the masters are at the average, and the copy that an evaluation computes with is not"
    stages = ("forward",)
    diagnoses = ("evaluation-copy-stale",)
    strategies = REFRESHED_COPY

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.strategies.engines.zero_state import ZeroTensors

        @self.breaking(patch, ZeroTensors, "refresh")
        def refresh(right: Any, tensors: Any, parameters: Any) -> None:
            pass


class ExportedAtY(_Averaging):
    id = "exported-at-y"
    title = "an export of schedule-free has the weights that it trains at, not their average"
    stages = ("round-trip",)
    diagnoses = ("export-not-average",)

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.training.finding import AverageReader
        from toolkit.training.tensor_folder import TensorReader

        @self.breaking(patch, AverageReader, "get")
        def get(right: Any, reader: Any, name: str, piece: Any = None) -> Any:
            return TensorReader.get(reader, name, piece)
