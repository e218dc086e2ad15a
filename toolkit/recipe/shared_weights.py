"""Weights that two layers share and that train beside frozen ones, as a model's code shows it, without torch."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Sequence
from pathlib import Path

from toolkit.recipe.model_facts import ModelFacts, auto_class_of, model_sources, value_in_class
from toolkit.recipe.schema import Recipe
from toolkit.tasks import task_of
from toolkit.tasks.labels import Labels


def shared_beside_frozen(recipe: Recipe, facts: ModelFacts) -> tuple[str, str] | None:
    """Names of one trained weight that the embedding and the head share, where part of the model is frozen: by
    ``model.freeze``, or by its own code, as the sinusoids of Whisper's encoder are. None where there is none, or where
    it is only seen in the model."""
    if recipe.adapter is not None or facts.value("tie_word_embeddings") is not True:
        return None
    name = auto_class_of(facts, task_of(recipe.model.task).auto_class)
    sources = model_sources(facts)
    tied = next((keys for source in sources if (keys := value_in_class(source, name, "_tied_weights_keys"))), None)
    if not isinstance(tied, dict) or len(tied) != 1:
        return None
    [(head, embedding)] = tied.items()
    if any(re.search(pattern, one) for pattern in recipe.model.freeze for one in (head, embedding)):
        return None
    # A decoder behind an encoder has all that the file defines for both; another model may have a part of it.
    own = task_of(recipe.model.task).labels is Labels.TARGET and any(map(_freezes, sources))
    return (embedding, head) if own or recipe.model.freeze else None


def why_not_in_units(names: Sequence[str]) -> str:
    """Why FSDP1 cannot shard them."""
    return (
        f"fsdp1 has what trains of a frozen model in units of its own, but {' and '.join(names)} share one weight; "
        "use fsdp2"
    )


@functools.cache
def _freezes(source: Path) -> bool:
    """Whether a class of an encoder freezes a layer whenever it is made: ``self.embed.requires_grad_(False)`` in its
    ``__init__``, under no condition."""
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ClassDef) or not node.name.endswith("Encoder"):
            continue
        made = (one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__")
        for statement in (one for function in made for one in function.body):
            if re.fullmatch(r"self(\.\w+)+\.requires_grad_\(False\)", ast.unparse(statement)):
                return True
    return False
