"""Models by their shape, and recipes around them: random weights, no tokenizer, no data, nothing to download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.gpu_evidence.cells import Setting, Skipped
from toolkit.errors import InputError
from toolkit.recipe.load import load_recipe
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve, strategies

Values = dict[str, Any]

LLAMA: Values = {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 131072}
MODELS: dict[str, Values] = {
    # meta-llama/Llama-3.2-1B and Llama-3.1-8B, as their config.json has them.
    "1b": LLAMA | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
                   "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True},
    "8b": LLAMA | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
                   "num_key_value_heads": 8, "tie_word_embeddings": False},
    "small": LLAMA | {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 8,
                      "num_key_value_heads": 4, "vocab_size": 2048, "max_position_embeddings": 2048,
                      "tie_word_embeddings": False},
}  # fmt: skip
TINY: Values = LLAMA | {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                        "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 512,
                        "tie_word_embeddings": False}  # fmt: skip
LORA: Values = {"method": "lora", "r": 16, "alpha": 32, "dropout": 0.05, "target_modules": "all-linear"}
TINY_LENGTH = 32

STRATEGIES: tuple[str, ...] = tuple(strategies())
DISTRIBUTED = tuple(name for name, strategy in strategies().items() if strategy.traits.distributed)


def recipe(setting: Setting, model: str, strategy: str, /, **sections: Any) -> Values:
    """A recipe for one process on the setting's device; ``sections`` are merged over it."""
    values: Values = {
        "model": {"config": TINY if setting.tiny else MODELS[model]},
        "tokenizer": {"path": "none"},
        "data": {"train": "built-in", "max_length": 1024, "workers": 0},
        "batch": {"micro_size": 1, "accumulation": 2},
        "optimizer": {"lr": 1.0e-4, "weight_decay": 0.1},
        "schedule": {"name": "cosine", "warmup_steps": 1},
        "precision": "bf16",
        "strategy": {"name": strategy},
        "machine": {"device": setting.device.type, "processes": 1},
        "run": {"max_steps": 10, "save_every": 0, "eval_every": 0},
    }
    for key, value in sections.items():
        values[key] = values[key] | value if isinstance(values.get(key), dict) else value
    if setting.tiny:
        values["data"]["max_length"] = min(TINY_LENGTH, values["data"]["max_length"])
    return values


def resolved_here(setting: Setting, values: Values) -> Resolved:
    """The recipe, resolved for the setting's device. Raises Skipped where the toolkit refuses it there (DeepSpeed's
    fp16 and FSDP's offload need a GPU): that is an answer, and not a failure."""
    try:
        return resolve(Recipe.model_validate(values), "recipe", device=setting.device.type)
    except InputError as error:
        raise Skipped(f"refused: {error}") from None


def preset(setting: Setting, folder: Path) -> Values:
    """A preset's recipe for one process here, everything else as it is in the file; its size where it is tiny."""
    values = load_recipe(folder / "recipe.yaml").model_dump(mode="json", exclude_unset=True)
    values["machine"] = {"device": setting.device.type, "processes": 1}
    if setting.tiny:
        values["model"]["config"] = TINY
        values["data"]["max_length"] = TINY_LENGTH
    return values
