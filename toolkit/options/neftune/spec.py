"""NEFTune, ``model.neftune_alpha``: its key, what it cannot be with, and its argument of the Trainer."""

from __future__ import annotations

from typing import Any

from toolkit.rooms import Option
from toolkit.tasks import task_of
from toolkit.tasks.labels import Labels


class Neftune(Option):
    name = "neftune"
    title = "NEFTune: noise on the input embeddings while training"
    typed_key = "model.neftune_alpha"
    axes = frozenset({"tensor", "expert"})
    claim = ("embedding-noise", "embeddings with noise")
    missing = "noise-missing"

    def refusals(self, settings: float, recipe: Any) -> list[str]:
        task = task_of(recipe.model.task)
        if task.media is None and task.labels is not Labels.TARGET:
            return []
        return [
            f"model.neftune_alpha: the noise is defined for one sequence of tokens, and {task.name} has other inputs; "
            "remove it"
        ]

    def decision(self, settings: float) -> tuple[float, str]:
        return settings, "times 1 / sqrt(tokens of the sample x width); in training_args.json: of the padded length"

    def training_args(self, settings: float) -> dict[str, Any]:
        return {"neftune_noise_alpha": settings}
