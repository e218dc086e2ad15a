"""Options that random recipes got later, drawn apart so that a seed's recipe is what it was in all else."""

from __future__ import annotations

import random
from typing import Any

from toolkit.strategies.layouts.expert import spec as expertable
from toolkit.strategies.layouts.pipeline import spec as stageable
from toolkit.strategies.layouts.tensor import spec as splittable

MODELS = {"tensor": splittable.FAMILIES, "pipeline": stageable.FAMILIES}

_PATTERNS = ("embed", r"\b(layers|h|layer|block)\.0\.", "norm|ln_", r"bias$", "lora_A", "mlp")
_METHODS: dict[str, dict[str, Any]] = {
    "ia3": {},
    "vera": {"r": 4},
    "loha": {"r": 2},
    "lokr": {"r": 2},
    "hra": {"r": 2},
    "ln-tuning": {},
    "prompt-tuning": {"options": {"num_virtual_tokens": 4}},
    "prefix-tuning": {"options": {"num_virtual_tokens": 4}},
}

_OF_ANY_OPTIMIZER = ("lr", "weight_decay", "decay", "max_grad_norm")
_NEWEST_FROM = 42000
"""The first seed whose recipe may have a mesh or train free of a schedule."""
_STAGES_FROM = 60000
"""The first seed whose mesh may be one of stages."""
_EXPERTS_FROM = 500000
"""The first seed whose mesh may be one of experts, whose experts may have a balance loss, and of which one in thirty
compiles."""
_ROUNDING_FROM = 900000
"""The first seed whose bfloat16 weights may be rounded stochastically."""
_BALANCED = ("granitemoe", "mixtral", "olmoe", "qwen3_moe")
"""Families whose config has ``output_router_logits``."""


def add_newer(recipe: dict[str, Any], seed: int) -> None:
    """Change ``recipe`` in place: most options in few recipes, some recipes with several."""
    draw = random.Random(f"newer {seed}")
    if draw.random() < 0.12:
        recipe["label_smoothing"] = draw.choice((0.1, 0.3))
    if draw.random() < 0.08:
        recipe["z_loss"] = 1.0e-3
    model = recipe["model"] = dict(recipe["model"])
    if draw.random() < 0.12:
        model["freeze"] = draw.sample(_PATTERNS, draw.choice((1, 1, 2)))
    if draw.random() < 0.08:
        model["neftune_alpha"] = 5.0
    if draw.random() < 0.1:
        recipe["run"] = recipe["run"] | {
            "ema": {"decay": 0.9, "every": draw.choice((1, 2)), "start": draw.choice((0, 1))}
        }
    if draw.random() < 0.12:
        recipe["tokenizer"] = recipe["tokenizer"] | {"add_tokens": ["<a>", "<b>"], "add_special_tokens": ["<c>"]}
    if draw.random() < 0.2:
        recipe["optimizer"] = _optimizer(draw, recipe["optimizer"])
    if draw.random() < 0.12:
        group = {"match": draw.choice(_PATTERNS), "lr": 3.0e-3} | draw.choice(({}, {"weight_decay": 0.3}))
        recipe["optimizer"] = recipe["optimizer"] | {"groups": [group]}
    if draw.random() < 0.2:
        recipe["schedule"] = _schedule(draw, recipe["schedule"])
    if draw.random() < 0.08:
        method = draw.choice(sorted(_METHODS))
        recipe["adapter"] = {"method": method, **_METHODS[method]}
    strategy = recipe["strategy"]
    if strategy["name"] in ("ddp", "fsdp1", "fsdp2") and draw.random() < 0.3:
        own = "every" if strategy["name"] == "ddp" else "last"
        recipe["strategy"] = strategy | {"sync": own}
        if strategy["name"] == "fsdp2" and draw.random() < 0.5:
            recipe["strategy"] |= {"reshard_after_forward": False}
    if seed >= _NEWEST_FROM:
        _add_newest(recipe, random.Random(f"newest {seed}"), stages=seed >= _STAGES_FROM)
    if seed >= _EXPERTS_FROM:
        _add_experts(recipe, random.Random(f"experts {seed}"))
    if seed >= _ROUNDING_FROM:
        _add_rounding(recipe, random.Random(f"rounding {seed}"))


def _add_rounding(recipe: dict[str, Any], draw: random.Random) -> None:
    optimizer = recipe["optimizer"]
    if optimizer.get("name", "adamw") == "adamw" and "kernel" not in optimizer and draw.random() < 0.15:
        recipe["precision"] = "bf16-pure"
        recipe["optimizer"] = optimizer | {"rounding": "stochastic"}


def _add_newest(recipe: dict[str, Any], draw: random.Random, *, stages: bool) -> None:
    """A mesh of two where two processes train; no mesh in a recipe that could not have it anyway."""
    model, name = recipe["model"], recipe["strategy"]["name"]
    refused = recipe.get("fp8") or "neftune_alpha" in model or "attention" in model or "task" in model
    if name != "single" and not refused and draw.random() < 0.3:
        able = ("context", "tensor") if name == "ddp" else ("context",)
        if stages and name in ("ddp", "fsdp2"):
            able = (*able, "pipeline")
        axis = draw.choice(able)
        if stages and axis != "context" and model["config"]["model_type"] in MODELS[axis] and draw.random() < 0.8:
            _suit(recipe, axis)
        recipe["strategy"] = recipe["strategy"] | ({"name": "fsdp2"} if axis == "tensor" else {}) | {"mesh": {axis: 2}}
    if draw.random() < 0.06:
        kept = {key: value for key, value in recipe["optimizer"].items() if key in _OF_ANY_OPTIMIZER}
        recipe["optimizer"] = kept | {"name": "schedule-free"}
        recipe["schedule"] = {"name": "constant", "warmup_steps": recipe["schedule"].get("warmup_steps", 0)}


def _add_experts(recipe: dict[str, Any], draw: random.Random) -> None:
    """Experts over two ranks, a balance loss, or compiled blocks, in recipes without a mesh."""
    model, strategy = recipe["model"], recipe["strategy"]
    family = model["config"]["model_type"]
    if family in _BALANCED and draw.random() < 0.3:
        model["config"] = model["config"] | {"output_router_logits": True}
    if draw.random() < 1 / 30:
        recipe["compile"] = True
    if (
        family in expertable.FAMILIES
        and "mesh" not in strategy
        and strategy["name"] != "single"
        and draw.random() < 0.5
    ):
        recipe["strategy"] = {"name": "fsdp2", "mesh": {"expert": 2}}
        _suit(recipe, "expert")
        recipe.pop("fp8", None)


def _suit(recipe: dict[str, Any], axis: str) -> None:
    """Leave out what ``axis`` does not support yet: nearly every recipe with it would be refused for some option."""
    recipe["run"] = {key: value for key, value in recipe["run"].items() if key != "ema"}
    recipe["tokenizer"] = {"path": "none"}
    optimizer = {key: value for key, value in recipe["optimizer"].items() if key != "groups"}
    if optimizer.get("name", "adamw") not in ("adamw", "lion", "sgd"):
        optimizer = {key: value for key, value in optimizer.items() if key in _OF_ANY_OPTIMIZER}
    recipe["optimizer"] = optimizer
    if recipe["precision"] == "fp16":
        recipe["precision"] = "bf16"
    if recipe.get("adapter"):
        recipe["adapter"] = {"method": "lora", "r": 2, "alpha": 8} | {
            key: value
            for key, value in recipe["adapter"].items()
            if key in ("r", "dropout", "modules_to_save", "target_modules")
        }
    if axis == "expert" and recipe.get("adapter"):
        recipe["adapter"].pop("modules_to_save", None)
        recipe["adapter"]["target_modules"] = ["o_proj"]
    if axis == "pipeline":
        recipe["strategy"] = {"name": "ddp"}  # two processes, both of them stages: fsdp2 has nothing to shard
    recipe.pop("compile", None)


def _optimizer(draw: random.Random, old: dict[str, Any]) -> dict[str, Any]:
    name = draw.choice(("muon", "lion", "adafactor", "sgd"))
    kept = {key: old[key] for key in _OF_ANY_OPTIMIZER if key in old}
    own: dict[str, Any] = {}
    if name == "sgd":
        own = draw.choice(({}, {"momentum": 0.0, "nesterov": False}, {"nesterov": True}))
    if name == "muon":
        own = draw.choice(({}, {"adjust_lr_fn": "original"}, {"ns_steps": 3}))
    return {"name": name, **kept, **own}


def _schedule(draw: random.Random, old: dict[str, Any]) -> dict[str, Any]:
    own = draw.choice(
        (
            {"name": "wsd", "decay_ratio": 0.5, "decay_shape": draw.choice(("linear", "cosine", "1-sqrt"))},
            {"name": "wsd", "decay_steps": 2, "min_ratio": 0.1},
            {"name": "polynomial", "power": 2.0, "min_ratio": 0.2},
            {"name": "inverse-sqrt"},
            {"name": "cosine", "min_ratio": 0.3},
        )
    )
    return {**own, "warmup_steps": old["warmup_steps"]}
