"""One random recipe for each seed."""

from __future__ import annotations

import random
from typing import Any

from families import EVERY_FAMILY
from fuzz_recipes.newer import add_newer

STRATEGIES = ("single", "ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2")
_DROPOUT_KEYS = (
    "attention_dropout", "attn_pdrop", "resid_pdrop", "hidden_dropout", "hidden_dropout_prob", "dropout",
    "dropout_rate",
)  # fmt: skip
_CUSTOM_HEADS = {"sequence-classification": ["score", "classifier"], "causal-lm": ["lm_head"]}


def draw_recipe(seed: int, families: tuple[str, ...] = tuple(EVERY_FAMILY)) -> tuple[str, dict[str, Any]]:
    """A family's name and a recipe of it, the same for the same seed. Most options keep their default in most recipes,
    so that a failure is easy to read; contradictions occur, and have to be refused with a reason."""
    draw = random.Random(seed)
    # Consecutive seeds visit all families in turn, in an order that changes with each round.
    turn, place = divmod(seed, len(families))
    family = random.Random(turn).sample(families, len(families))[place]
    model = dict(EVERY_FAMILY[family])
    task = model.get("task", "causal-lm")
    config = model["config"] = dict(model["config"])
    if draw.random() < 0.3:
        config["tie_word_embeddings"] = draw.random() < 0.5
    if draw.random() < 0.3:
        config |= dict.fromkeys(draw.sample(_DROPOUT_KEYS, 3), 0.1)
    if task == "causal-lm" and draw.random() < 0.15:
        model["attention"] = "eager"
    strategy = draw.choice(STRATEGIES)
    precision = draw.choices(("fp32", "bf16", "fp16", "bf16-pure"), (35, 45, 8, 12))[0]
    if precision == "fp16" and strategy.startswith("zero") and draw.random() < 0.8:
        precision = "bf16"  # DeepSpeed has no fp16 on a CPU
    recipe: dict[str, Any] = {
        "model": model,
        "tokenizer": {"path": "none"},
        "adapter": _adapter(draw, task),
        "data": _data(draw, task),
        "batch": {"micro_size": draw.choice((1, 2)), "accumulation": draw.choice((1, 2, 3))},
        "optimizer": _optimizer(draw, strategy),
        "schedule": {"name": draw.choice(("cosine", "linear", "constant")), "warmup_steps": draw.choice((0, 0, 2))},
        "precision": precision,
        "activation_checkpointing": draw.choices(("none", "full", "selective"), (35, 25, 40))[0],
        "strategy": _strategy(draw, strategy),
        "machine": {"device": "cpu", "processes": 1 if strategy == "single" else 2},
        "run": {"max_steps": 5, "seed": draw.randrange(1000)},
    }
    if task == "causal-lm" and draw.random() < 0.25:
        recipe["loss"] = "fused"
    if precision in ("bf16", "bf16-pure") and draw.random() < 0.1:
        recipe["fp8"] = True
    if draw.random() < 0.01:
        recipe["compile"] = True
    add_newer(recipe, seed)
    return family, {key: value for key, value in recipe.items() if value is not None}


def _adapter(draw: random.Random, task: str) -> dict[str, Any] | None:
    method = draw.choices((None, "lora", "dora", "qlora"), (50, 25, 12, 13))[0]
    if method is None:
        return None
    adapter: dict[str, Any] = {"method": method, "r": draw.choice((2, 4)), "alpha": 8}
    if draw.random() < 0.3:
        adapter["dropout"] = 0.1
    if draw.random() < 0.2 and task in _CUSTOM_HEADS:
        adapter["modules_to_save"] = [draw.choice(_CUSTOM_HEADS[task])]
    if draw.random() < 0.2:
        adapter["target_modules"] = draw.choice(
            (["q_proj", "v_proj"], ["query", "value"], ["down_proj"], r".*\.(q_proj|k_proj|query|c_attn|qkv_proj)")
        )
    return adapter


def _data(draw: random.Random, task: str) -> dict[str, Any]:
    data: dict[str, Any] = {"train": "built-in", "max_length": 48, "workers": 0}
    if task == "seq2seq-lm":
        data["format"] = "prompt-completion"
    elif task == "causal-lm":
        data["format"] = draw.choices(("text", "prompt-completion", "messages"), (60, 20, 20))[0]
        how = draw.random()
        if how < 0.2:
            data["packing"] = True
    if not data.get("packing") and draw.random() < 0.15:
        data["group_by_length"] = True
    if draw.random() < 0.1:
        data["shuffle"] = False
    return data


def _optimizer(draw: random.Random, strategy: str) -> dict[str, Any]:
    optimizer: dict[str, Any] = {"lr": draw.choice((1.0e-3, 1.0e-2))}
    if draw.random() < 0.12 and (not strategy.startswith("zero") or draw.random() < 0.2):
        optimizer["name"] = "adamw8bit"
    elif draw.random() < 0.15:
        optimizer["kernel"] = "foreach"
    optimizer["max_grad_norm"] = draw.choice((1.0, 0.5, None))
    if draw.random() < 0.6:
        optimizer["weight_decay"] = 0.1
        optimizer["decay"] = draw.choice(("matrices", "all"))
    if draw.random() < 0.2:
        optimizer["betas"] = [0.8, 0.95]
    return optimizer


def _strategy(draw: random.Random, name: str) -> dict[str, Any]:
    strategy: dict[str, Any] = {"name": name}
    if name.startswith("fsdp") and draw.random() < 0.3:
        strategy["reshard_after_forward"] = False
    if draw.random() < 0.12 and name not in ("single", "ddp"):
        strategy["offload"] = draw.choice(("optimizer", "all"))
    return strategy
