"""What README and the tables of docs promise, an option at a time: its keys, what its verdict has to show, and the
strategies that refuse it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from families import EVERY_FAMILY, FAMILIES
from media import IMAGE_CLASSIFIERS, RESNET, SEEING, WHISPER
from tiny import LLAMA
from toolkit.verification.outcome import Outcome

Sections = dict[str, Any]
FAMILY_OF = {
    "single": "replicated", "ddp": "replicated",
    "zero1": "zero", "zero2": "zero", "zero3": "zero",
    "fsdp1": "fsdp", "fsdp2": "fsdp",
}  # fmt: skip
STRATEGIES = tuple(FAMILY_OF)


def claim(name: str) -> Callable[[Outcome], bool]:
    """That the last pass has this evidence (it is not equivalent without)."""
    return lambda outcome: any(one.id == name and one.ok for one in outcome.passes[-1].claims)


def recipe_has(*keys: str, value: Any) -> Callable[[Outcome], bool]:
    """That the recipe of the last pass, the small model's, has this value."""

    def seen(outcome: Outcome) -> bool:
        reference = outcome.passes[-1].reference
        found: Any = reference and reference.resolved.recipe
        for key in keys:
            found = found[key] if isinstance(found, dict) else getattr(found, key)
        return bool(found == value)

    return seen


def measured(kind: str) -> Callable[[Outcome], bool]:
    """That something of this kind was compared."""
    return lambda outcome: any(m.kind == kind for one in outcome.passes for s in one.stages for m in s.measures)


@dataclass(frozen=True)
class Option:
    """``seen``: what its verdict has to show, so that it cannot pass with the option off. ``refused``: strategies that
    cannot have it, with a part of the message. ``concerns``: strategies for which it changes anything. ``long``: no
    default row, since a verdict takes longer than a default test may."""

    sections: Sections
    seen: Callable[[Outcome], bool]
    refused: dict[str, str] = field(default_factory=dict)
    concerns: tuple[str, ...] = STRATEGIES
    long: bool = False


def _adapter(method: str = "lora", **keys: Any) -> Sections:
    return {"adapter": {"method": method, **keys}}


def _adapted(method: str) -> Callable[[Outcome], bool]:
    return recipe_has("adapter", "method", value=method)


def _optimizer(name: str, refused: dict[str, str] | None = None) -> Option:
    return Option({"optimizer": {"name": name}}, recipe_has("optimizer", "name", value=name), refused or {})


def _schedule(name: str, **keys: Any) -> Option:
    return Option({"schedule": {"name": name, **keys}}, recipe_has("schedule", "name", value=name))


def _task(task: str, family: Sections, **data: Any) -> Option:
    return Option({"model": family | {"task": task}, "data": data}, recipe_has("model", "task", value=task))


_ZERO = ("zero1", "zero2", "zero3")
_SLICES = dict.fromkeys((*_ZERO, "fsdp1"), "updates slices of a flat tensor")
_OF_A_LAYER = {"fsdp1": "which fsdp1 has already sharded"}

OPTIONS: dict[str, Option] = {
    # What trains.
    "lora": Option(_adapter(r=4, dropout=0.1), _adapted("lora")),
    "dora": Option(_adapter("dora", r=4), _adapted("dora"), _OF_A_LAYER),
    "qlora": Option(_adapter("qlora", r=4), _adapted("qlora")),
    "ia3": Option(_adapter("ia3"), _adapted("ia3"), _OF_A_LAYER),
    "prompt-tuning": Option(_adapter("prompt-tuning", options={"num_virtual_tokens": 4}), _adapted("prompt-tuning")),
    "modules_to_save": Option(
        _adapter(r=4, modules_to_save=["lm_head"]), recipe_has("adapter", "modules_to_save", value=["lm_head"])
    ),
    "new tokens": Option(
        {"tokenizer": {"add_tokens": ["<a>", "<b>"], "add_special_tokens": ["<|im_end|>"]}},
        recipe_has("tokenizer", "add_tokens", value=["<a>", "<b>"]),
        _OF_A_LAYER,
    ),
    "freeze": Option({"model": {"freeze": ["embed_tokens", r"layers\.0\."]}}, claim("frozen")),
    "tied weights": Option({"model": {"config": {"tie_word_embeddings": True}}}, claim("tied")),
    # How it computes.
    "bf16": Option({"precision": "bf16"}, claim("dtype")),
    "fp16": Option({"precision": "fp16"}, claim("overflow"), dict.fromkeys(_ZERO, "DeepSpeed runs fp16 on a GPU only")),
    "bf16-pure": Option({"precision": "bf16-pure"}, claim("dtype")),
    "recompute full": Option({"activation_checkpointing": "full"}, claim("recomputation")),
    "recompute selective": Option({"activation_checkpointing": "selective"}, claim("recomputation")),
    "fp8": Option({"fp8": True}, claim("float8-products")),
    "compile": Option(
        {"compile": True},
        claim("compiled"),
        {"zero3": "is not supported with zero3", "fsdp1": "is not supported with fsdp1"},
        long=True,
    ),
    "fused loss": Option({"loss": "fused"}, claim("fused-loss")),
    "packing": Option({"data": {"packing": True}}, claim("packed-rows")),
    "varlen": Option({"model": {"attention": "varlen"}}, measured("loss-samples-apart")),
    "label smoothing": Option({"label_smoothing": 0.1}, recipe_has("label_smoothing", value=0.1)),
    "z-loss": Option({"z_loss": 1e-3}, recipe_has("z_loss", value=1e-3)),
    "neftune": Option({"model": {"neftune_alpha": 5.0}}, claim("embedding-noise")),
    "batch norm": Option(
        {"model": {"config": RESNET, "task": "image-classification", "num_labels": 3}, "data": {"format": "image"}},
        measured("running-statistic"),
    ),
    # How it updates.
    "ema": Option({"run": {"ema": {"decay": 0.99, "every": 2, "start": 1}}}, measured("average")),
    "parameter groups": Option(
        {"optimizer": {"groups": [{"match": "down_proj", "lr": 3e-4}, {"match": "q_proj", "weight_decay": 0.2}]}},
        lambda outcome: len(outcome.twin.recipe.optimizer.groups) == 2,
    ),
    "foreach": Option({"optimizer": {"kernel": "foreach"}}, recipe_has("optimizer", "kernel", value="foreach")),
    "sgd": _optimizer("sgd"),
    "lion": _optimizer("lion"),
    "schedule-free": _optimizer("schedule-free"),
    "adamw8bit": _optimizer("adamw8bit", dict.fromkeys(_ZERO, "moments as slices of one flat tensor")),
    "muon": _optimizer("muon", _SLICES),
    "adafactor": _optimizer("adafactor", _SLICES),
    "stochastic rounding": Option(
        {"optimizer": {"rounding": "stochastic"}}, recipe_has("optimizer", "rounding", value="stochastic")
    ),
    "no clipping": Option({"optimizer": {"max_grad_norm": None}}, recipe_has("optimizer", "max_grad_norm", value=None)),
    "decay of all": Option({"optimizer": {"decay": "all"}}, recipe_has("optimizer", "decay", value="all")),
    "learning rate by batch": Option(
        {"optimizer": {"lr_scaling": "sqrt", "base_global_batch": 4}},
        recipe_has("optimizer", "lr_scaling", value="sqrt"),
    ),
    "linear": _schedule("linear"),
    "constant": _schedule("constant"),
    "wsd": _schedule("wsd", decay_steps=2),
    "polynomial": _schedule("polynomial", power=2.0),
    "inverse-sqrt": _schedule("inverse-sqrt"),
    # How it is distributed.
    "sync last": Option(
        {"strategy": {"sync": "last"}},
        claim("sync"),
        {"single": "nothing is summed over ranks"}
        | dict.fromkeys(("zero2", "zero3"), "sums gradients after every micro-batch alone"),
        concerns=("ddp", "fsdp1", "fsdp2"),
    ),
    "one micro-batch": Option({"batch": {"accumulation": 1}}, recipe_has("batch", "accumulation", value=1)),
    "offload optimizer": Option(
        {"strategy": {"offload": "optimizer"}},
        recipe_has("strategy", "offload", value="optimizer"),
        dict.fromkeys(("single", "ddp", "fsdp1", "fsdp2"), "cannot offload 'optimizer'"),
    ),
    "offload all": Option(
        {"strategy": {"offload": "all"}},
        recipe_has("strategy", "offload", value="all"),
        dict.fromkeys(("single", "ddp", "zero1", "zero2"), "cannot offload 'all'")
        | dict.fromkeys(("fsdp1", "fsdp2"), "FSDP offloads from a GPU"),
    ),
    "no resharding": Option(
        {"strategy": {"reshard_after_forward": False}},
        recipe_has("strategy", "reshard_after_forward", value=False),
        concerns=("fsdp1", "fsdp2"),
    ),
    "unsharded blocks": Option(
        {"strategy": {"unsharded_blocks": 1}},
        claim("unsharded-weights"),
        dict.fromkeys(("single", "ddp", "zero1", "zero2"), "shards no weights"),
    ),
    # Tasks and models.
    "seq2seq-lm": _task("seq2seq-lm", FAMILIES["t5"], format="prompt-completion"),
    "sequence-classification": _task("sequence-classification", FAMILIES["bert"]),
    "sequence-regression": _task("sequence-regression", EVERY_FAMILY["llama"] | {"num_labels": 1}),
    "token-classification": _task(
        "token-classification", {"config": EVERY_FAMILY["bert"]["config"], "num_labels": 3}, format="tokens"
    ),
    "masked-lm": _task("masked-lm", {"config": EVERY_FAMILY["bert"]["config"]}),
    "image-classification": _task(
        "image-classification", {"config": IMAGE_CLASSIFIERS["vit"], "num_labels": 3}, format="image"
    ),
    "image-text-to-text": _task("image-text-to-text", {"config": SEEING["qwen3_vl"]}, format="messages", max_length=64),
    # Whisper's positions are frozen by transformers, and its head and embeddings are one weight.
    "speech-seq2seq": replace(
        _task("speech-seq2seq", {"config": WHISPER}, format="audio"),
        refused={"fsdp1": "embed_tokens.weight and proj_out.weight share one weight; use fsdp2"},
    ),
    "experts": Option(
        {"model": FAMILIES["mixtral"]}, lambda outcome: "num_local_experts" in (outcome.twin.recipe.model.config or {})
    ),
    "gpt2": Option({"model": FAMILIES["gpt2"]}, recipe_has("model", "config", "model_type", value="gpt2")),
}


@dataclass(frozen=True)
class Row:
    """Options together. ``default``: the strategies that the default set verifies; the night has all others.

    ``saved``: whether the run is also saved, loaded, resumed and exported, for options that change what is saved.
    ``logic``: whether a recipe in 16 bits is run in float32, too, which holds its data besides.
    """

    options: tuple[str, ...]
    default: tuple[str, ...]
    saved: bool = False
    logic: bool = False

    @property
    def name(self) -> str:
        return " + ".join(self.options)

    def sections(self) -> Sections:
        """The keys of all its options; the first that names a model is the row's."""
        merged: Sections = {"model": {"config": dict(LLAMA) | {"attention_dropout": 0.1}}}
        for option in self.options:
            over = OPTIONS[option].sections
            config = over.get("model", {}).get("config", {})
            if "model_type" in config:
                merged["model"] = {}
            _merge(merged, over)
        return merged


def _merge(into: Sections, over: Sections) -> None:
    for key, value in over.items():
        if isinstance(value, dict):
            into[key] = dict(into.get(key) or {})
            _merge(into[key], value)
        else:
            into[key] = value


ROWS = [
    Row(
        ("lora", "bf16", "recompute full", "foreach", "no resharding"),
        ("ddp", "zero3", "fsdp2"),
        saved=True,
        logic=True,
    ),
    Row(("qlora", "bf16", "packing", "parameter groups", "linear"), ("ddp", "zero2", "fsdp1"), saved=True),
    Row(("fused loss", "tied weights", "bf16-pure", "stochastic rounding"), ("single", "zero2", "fsdp2"), saved=True),
    Row(("fp16", "recompute selective", "gpt2", "decay of all"), ("ddp", "fsdp1")),
    Row(("muon", "z-loss", "fused loss", "polynomial"), ("ddp", "fsdp2")),
    Row(("adafactor", "tied weights", "learning rate by batch"), ("single", "fsdp2"), saved=True),
    Row(("adamw8bit", "lora", "bf16", "no clipping"), ("ddp", "fsdp1"), saved=True),
    Row(("fp8", "bf16", "lora", "recompute full"), ("ddp", "zero2", "fsdp2")),
    Row(("compile", "lora", "recompute full"), ()),
    Row(("dora", "new tokens", "tied weights", "bf16"), ("single", "zero3", "fsdp2"), saved=True),
    Row(("modules_to_save", "fused loss", "bf16", "no clipping", "z-loss"), ("ddp", "zero1", "fsdp1"), saved=True),
    Row(("lora", "unsharded blocks", "bf16", "recompute full"), ("zero3", "fsdp1")),
    Row(("offload optimizer", "bf16"), ("zero2",), saved=True),
    Row(("offload all", "bf16"), ("zero3",)),
    Row(("ia3", "gpt2", "bf16", "ema"), ("ddp", "zero2", "fsdp2"), saved=True),
    Row(("prompt-tuning", "recompute full", "bf16"), ("ddp", "zero3", "fsdp1"), saved=True),
    Row(("experts", "packing", "varlen", "sync last", "decay of all", "recompute full"), ("ddp", "zero1", "fsdp2")),
    Row(("seq2seq-lm", "lora", "recompute full", "no clipping"), ("ddp", "zero2", "fsdp1"), saved=True),
    Row(("sequence-classification", "label smoothing", "neftune"), ("ddp", "zero2", "fsdp2")),
    Row(("sequence-regression", "freeze", "neftune", "ema", "bf16"), ("ddp", "zero1", "fsdp1"), saved=True),
    Row(("token-classification", "recompute selective", "polynomial"), ("ddp", "zero1", "fsdp1")),
    Row(("masked-lm", "lion", "wsd", "bf16"), ("single", "zero1", "fsdp2")),
    Row(("image-classification", "lora", "schedule-free", "constant"), ("ddp", "zero3", "fsdp2"), saved=True),
    Row(("image-text-to-text",), ("single", "zero2", "fsdp2")),
    Row(
        (
            "speech-seq2seq",
            "bf16",
            "sgd",
            "one micro-batch",
            "inverse-sqrt",
            "recompute full",
            "learning rate by batch",
        ),
        ("ddp", "zero3", "fsdp2"),
    ),
    Row(("batch norm", "bf16"), ("ddp", "zero1", "fsdp2"), saved=True),
]
