"""The table of `strategy.mesh`: each axis under strategies and options, and what is seen of a right run.

A row is a recipe. `DEFAULT` is what every run of the tests verifies; `NIGHTLY` has every option, family and size of
each axis. `KILLED` says in which recipes the faults of each axis are found.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from families import EVERY_FAMILY
from tiny import LLAMA, recipe_dict
from toolkit.errors import InputError
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve, strategies
from toolkit.strategies.layouts.expert.spec import FAMILIES as WITH_EXPERTS
from toolkit.strategies.layouts.pipeline.spec import FAMILIES as WITH_STAGES
from toolkit.strategies.layouts.tensor.spec import FAMILIES as WITH_LAYERS
from toolkit.verification.faults import context, experts, faults, layers, mesh, stages

Axes = Mapping[str, int]

LORA = {"r": 4, "dropout": 0.1}
EVERYWHERE = LORA | {"target_modules": "all-linear"}
BESIDE_EXPERTS = LORA | {"target_modules": ["q_proj", "v_proj"]}
ON_EXPERTS = {"r": 4, "dropout": 0}
"""PEFT's own choice for a mixture: adapters on attention, and on each expert's matrices."""
MIXTRAL: dict[str, Any] = EVERY_FAMILY["mixtral"]["config"]
"""Four experts of which each token has two."""
HEAD_NORMS = {"model_type": "qwen3", "head_dim": 8}
TIED = {"tie_word_embeddings": True}


@dataclass(frozen=True)
class Row:
    """``sections``: what the recipe says beside strategy, mesh and number of processes. A model's config without
    ``vocab_size`` is laid over the one that the axes are tested with.
    """

    what: str
    name: str
    mesh: Axes
    sections: Mapping[str, Any] = field(default_factory=dict)
    seen: Mapping[str, str] = field(default_factory=dict)
    """By claim: what one of its kind has seen."""
    exact: bool = False
    """Gradients are the plain loop's but for four roundings of float32, and in float32 those of a model that no rank
    has a part of."""
    compared: str = ""
    """Part of the name of a weight that has to be among those compared."""
    round_trip: bool = True

    @property
    def id(self) -> str:
        axes = (axis if size == 2 else f"{axis}{size}" for axis, size in self.mesh.items())
        return "-".join([*axes, self.name, self.what])

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh.values())

    def resolved(self, recipe: Callable[..., Resolved]) -> Resolved:
        sections = dict(self.sections)
        model = {"config": {}} | sections.pop("model", {})
        if "vocab_size" not in model["config"]:
            model["config"] = config_for(self.mesh) | model["config"]
        strategy = {"mesh": dict(self.mesh)} | sections.pop("strategy", {})
        return recipe(self.name, strategy=strategy, machine={"processes": self.ranks}, model=model, **sections)


def config_for(axes: Axes) -> dict[str, Any]:
    """The model that the axes are tested with: dropout in attention where ranks have whole heads, two blocks for each
    stage."""
    config = dict(MIXTRAL if "expert" in axes else LLAMA)
    if not axes.keys() & {"tensor", "expert", "pipeline"}:
        config["attention_dropout"] = 0.1
    return config | ({"num_hidden_layers": 4} if "pipeline" in axes else {})


# ------------------------------------------------------------------ what is seen

HYBRID: Axes = {"replicate": 2, "shard": 2}
EXCHANGES = {
    "context": "all-to-all context",
    "expert": "all-to-all expert",
    "tensor": "all-reduce tensor",
    "pipeline": "all-reduce pipeline",
}
EVIDENCE = {
    "tensor": {"layers-divided", "layers-alike"},
    "pipeline": {"stages", "stage-weights", "schedule", "bubble", "stage-exchanges"},
    "expert": {"experts-divided"},
}


def collectives(row: Row) -> set[str]:
    """Which collectives have to run along which axis."""
    size = {axis: row.mesh.get(axis, 1) for axis in ("replicate", "shard", *EXCHANGES)}
    found = {kind for axis, kind in EXCHANGES.items() if size[axis] > 1}
    copies, shards = size["replicate"], size["shard"] * size["context"] * size["expert"]
    if row.name == "ddp":  # without stages its own all-reduce is not watched by axis
        return found | ({"all-reduce all"} if size["pipeline"] > 1 and copies * shards > 1 else set())
    if copies > 1 and shards > 1:
        over_all = {"all-gather shard", "reduce-scatter all"}
        found |= (
            over_all if row.name == "zero3" else {"all-gather shard", "reduce-scatter shard", "all-reduce replicate"}
        )
    elif size["pipeline"] > 1 or size["expert"] > 1:
        found |= {"all-gather all", "reduce-scatter all"}
    return found | ({"all-gather copies"} if size["expert"] > 1 and size["shard"] > 1 else set())


def evidence(row: Row) -> set[str]:
    """Which claims have to be made, and hold."""
    found = {claim for axis in row.mesh for claim in EVIDENCE.get(axis, ()) if row.mesh[axis] > 1}
    if row.mesh == HYBRID:
        found |= {"mesh", "mesh-copies", "share-of-state" if row.name == "zero3" else "share-of-weights"}
    if "expert" in row.mesh:
        found |= {"mesh", "mesh-copies", "share-of-weights"}
    return found


# ------------------------------------------------------------------ options and families

_BF16 = {"precision": "bf16"}
OPTIONS: dict[str, dict[str, Any]] = {
    "balance": {"model": {"config": {"output_router_logits": True}}},
    "bf16-pure": {"precision": "bf16-pure"},
    "classification": {"model": {"task": "sequence-classification", "num_labels": 3, "config": {"pad_token_id": 0}}},
    "eager": _BF16 | {"model": {"attention": "eager"}},
    "ema": _BF16 | {"run": {"ema": {"decay": 0.9, "every": 1, "start": 0}}},
    "ema-tied": {"run": {"ema": {"decay": 0.9, "every": 2, "start": 1}}, "model": {"config": TIED}},
    "foreach": {"optimizer": {"kernel": "foreach"}},
    "fp16": {"precision": "fp16"},
    "frozen": {"model": {"freeze": ["embed"]}},
    "frozen-experts": _BF16 | {"model": {"freeze": [r"experts\."]}},
    "fused": _BF16 | {"loss": "fused"},
    "gathered-once": _BF16 | {"strategy": {"reshard_after_forward": False}},
    "groups": {"optimizer": {"groups": [{"match": "mlp", "lr": 1e-3, "weight_decay": 0.3}]}},
    "groups-of-a-block": {"optimizer": {"groups": [{"match": "mlp", "lr": 1e-3, "weight_decay": 0.3},
                                                   {"match": r"layers\.3\.", "lr": 2e-4}]}},
    "groups-of-experts": {"optimizer": {"groups": [{"match": "experts", "lr": 1e-3, "weight_decay": 0.3}]}},
    "head-saved": _BF16 | {"adapter": LORA | {"modules_to_save": ["lm_head"]}},
    "head-saved-tied": {"adapter": LORA | {"modules_to_save": ["lm_head"]}, "model": {"config": TIED}},
    "masks-fused": {"adapter": LORA, "loss": "fused", "label_smoothing": 0.3},
    "not-clipped": {"optimizer": {"max_grad_norm": 0.0}},
    "one-key-head": _BF16 | {"model": {"config": {"num_key_value_heads": 1}}},
    "one-micro-batch": {"batch": {"accumulation": 1}},
    "packed": {"data": {"packing": True}},
    "packed-fused": _BF16 | {"data": {"packing": True}, "loss": "fused"},
    "packed-recomputed": _BF16 | {"data": {"packing": True}, "activation_checkpointing": "full"},
    "recomputed": _BF16 | {"activation_checkpointing": "full"},
    "recomputed-lora": _BF16 | {"activation_checkpointing": "full", "adapter": LORA},
    "selective": _BF16 | {"activation_checkpointing": "selective"},
    "sync-every": {"strategy": {"sync": "every"}},
    "sync-every-packed": {"strategy": {"sync": "every"}, "data": {"packing": True, "max_length": 48},
                          "batch": {"micro_size": 1, "accumulation": 3}},
    "sync-last": {"strategy": {"sync": "last"}, "model": {"config": TIED}},
    "sync-last-gathered": _BF16 | {"strategy": {"sync": "last", "reshard_after_forward": False}},
    "terms": {"label_smoothing": 0.1, "z_loss": 1e-4},
    "three-blocks": {"model": {"config": {"num_hidden_layers": 3}}},
    "tied": _BF16 | {"model": {"config": TIED}},
    "tied-dropout": {"model": {"config": TIED | {"attention_dropout": 0.1}}},
    **{name: {"optimizer": {"name": name}} for name in ("muon", "adafactor")},
    **{name: {"optimizer": {"name": name, "lr": lr}} for name, lr in (("lion", 1e-4), ("sgd", 1e-2))},
    # Models of other types.
    "biases": _BF16 | {"model": {"config": {"model_type": "qwen2"}}},
    "experts": {"model": {"config": HEAD_NORMS | {"model_type": "qwen3_moe", "num_experts": 4,
                                                          "num_experts_per_tok": 2, "moe_intermediate_size": 32}}},
    "positions-learned": {"model": {"config": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4,
                                               "vocab_size": 300, "n_positions": 64}}},
    "sliding": _BF16 | {"model": {"config": {"model_type": "mistral", "sliding_window": 5}}},
}  # fmt: skip


# ------------------------------------------------------------------ rows

TWO: dict[str, Axes] = {axis: {axis: 2} for axis in EXCHANGES}
PAIR: Axes = {"context": 2, "tensor": 2}
"""The one pair of axes that works: rows and layers."""
SHARDED: dict[str, Axes] = {axis: {axis: 2, "shard": 2} for axis in EXCHANGES}
COPIED: dict[str, Axes] = {axis: {axis: 2, "replicate": 2} for axis in EXCHANGES}
HALVES = {"layers-divided": "2"}
STAGES = {"stages": "0-1 | 2-3", "bubble": "2 of 8"}
COUNTED = STAGES | {
    "schedule": "3 forwards, 3 backwards",
    "stage-exchanges": "3 hidden states sent, 0 hidden states received, 0 gradients sent, 3 gradients received",
}
"""Of two stages, four blocks and three micro-batches."""
_PACKED = {"data": {"packing": True}, "loss": "fused"}
PACKED_NORMS = _PACKED | {"model": {"config": HEAD_NORMS}}
PACKED_EXPERTS = _PACKED | {"model": EVERY_FAMILY["qwen3_moe"], "adapter": BESIDE_EXPERTS}

DEFAULT = [
    Row("lora", "ddp", TWO["context"], OPTIONS["recomputed-lora"] | {"loss": "fused"}, exact=True),
    Row("tied", "zero2", TWO["context"], OPTIONS["packed"] | {"model": {"config": TIED}}, exact=True, round_trip=False),
    Row("lora", "fsdp2", TWO["tensor"], OPTIONS["recomputed-lora"], HALVES, exact=True),
    Row("head-norms", "fsdp2", TWO["tensor"], PACKED_NORMS, HALVES, exact=True, round_trip=False),
    Row("lora", "ddp", TWO["pipeline"], OPTIONS["recomputed-lora"], COUNTED, exact=True),
    Row("packed", "ddp", TWO["pipeline"], OPTIONS["tied-dropout"] | OPTIONS["packed"], COUNTED, exact=True,
        round_trip=False),
    Row("recomputed", "fsdp2", TWO["expert"], OPTIONS["recomputed"], exact=True),
    Row("lora", "fsdp2", TWO["expert"], PACKED_EXPERTS, exact=True, round_trip=False),
    Row("activations", "fsdp2", SHARDED["tensor"], {"model": {"config": {"model_type": "apertus"}}}, HALVES,
        compared="alpha_p", round_trip=False),  # xIELU has two weights, which no plan names
    Row("recomputed-fp32", "fsdp2", SHARDED["pipeline"], {"activation_checkpointing": "full"}, STAGES,
        round_trip=False),
]  # fmt: skip
"""Each axis on two ranks, and on four shards of parts and of stages; options together where they can be."""


def _with_options() -> Iterator[Row]:
    for names, axes, options in (
        ("fsdp2", TWO["context"], "bf16-pure terms packed-recomputed selective ema muon one-key-head tied sliding "
         "experts positions-learned"),
        ("fsdp2", TWO["tensor"], "bf16-pure selective terms lion sgd foreach groups frozen head-saved tied biases "
         "classification eager sync-last sync-every-packed"),
        ("fsdp2", SHARDED["tensor"], "bf16-pure selective lion groups frozen head-saved tied biases classification "
         "gathered-once sync-last-gathered"),
        ("ddp", TWO["pipeline"], "bf16-pure selective masks-fused packed-fused terms lion sgd foreach not-clipped "
         "frozen head-saved head-saved-tied biases eager one-micro-batch groups-of-a-block ema ema-tied three-blocks"),
        ("fsdp2", SHARDED["pipeline"], "bf16-pure recomputed gathered-once sync-last sync-last-gathered masks-fused "
         "packed-fused"),
        ("fsdp2", TWO["expert"], "bf16-pure selective terms lion frozen-experts balance eager one-micro-batch"),
        ("fsdp2", SHARDED["expert"], "sync-last-gathered"),
        ("fsdp2", SHARDED["expert"], "groups-of-experts tied-dropout packed-fused"),
        ("fsdp2", PAIR, "bf16-pure packed-fused recomputed-lora terms lion biases tied one-micro-batch"),
        ("fsdp1", HYBRID, "fp16 bf16-pure ema fused"),
        ("fsdp2", HYBRID, "fp16 bf16-pure ema lion muon adafactor fused packed sync-last-gathered"),
        ("zero3", HYBRID, "bf16-pure ema fused"),  # DeepSpeed has fp16 on GPUs alone
    ):  # fmt: skip
        for name in names.split():
            yield from (Row(option, name, axes, OPTIONS[option]) for option in options.split())


def with_divisible_rows() -> list[str]:
    """The families that ``strategy.mesh.context`` takes."""
    found = []
    for name, model in EVERY_FAMILY.items():
        values = recipe_dict(Path("nowhere"), strategy={"name": "fsdp2", "mesh": {"context": 2}}, model=dict(model))
        with contextlib.suppress(InputError):
            resolve(Recipe.model_validate(values | {"machine": {"processes": 2}}), "recipe", device="cpu")
            found.append(name)
    return found


def _of_families() -> Iterator[Row]:
    """The families that are named as verified, in bf16."""
    everywhere = {"r": 4, "target_modules": "all-linear"}
    no_masks = {"attention_dropout": 0.0}
    # (strategies, axes, families, adapters, what is laid over a family's config, whether the rest of its recipe counts)
    for names, axes, families, adapters, own, whole in (
        ("fsdp2", TWO["context"], with_divisible_rows(), (None,), {}, True),
        ("fsdp2", TWO["tensor"], WITH_LAYERS, (None, everywhere), no_masks, False),
        ("ddp", TWO["pipeline"], WITH_STAGES, (None, everywhere), {}, False),
        ("fsdp2", TWO["expert"], WITH_EXPERTS, (None, BESIDE_EXPERTS, ON_EXPERTS), {}, True),
        # gemma2's attention is not sdpa.
        ("fsdp2", PAIR, sorted({*WITH_LAYERS} - {"gemma2"}), (None,), no_masks | {"num_attention_heads": 4}, False),
    ):  # fmt: skip
        for name in names.split():
            for family in families:
                given = EVERY_FAMILY.get(family, {"config": {"model_type": family}})
                model = (dict(given) if whole else {}) | {"config": given["config"] | own}
                for adapter in adapters:
                    if "expert" in axes and adapter is not None:
                        adapter = _with_targets(family, adapter)
                    sections = {"precision": "bf16", "model": model, "adapter": adapter}
                    yield Row(f"{family}-{_kind(adapter)}", name, axes, sections)


def _kind(adapter: dict[str, Any] | None) -> str:
    return "full" if adapter is None else "lora" if adapter.get("dropout", 1) else "on-experts"


def _with_targets(family: str, adapter: dict[str, Any]) -> dict[str, Any]:
    """On layers that the family has; PEFT has no choice of its own for some."""
    adapter = {"target_modules": ["q_proj"]} | adapter
    if family == "deepseek_v3":
        adapter["target_modules"] = ["q_b_proj", "kv_b_proj"]
    if not adapter["dropout"]:
        adapter["options"] = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    return adapter


def _of_sizes() -> Iterator[Row]:
    """Models and numbers of ranks, with all weights and with adapters."""
    distributed = " ".join(name for name, strategy in strategies().items() if strategy.traits.distributed)
    models: dict[str, dict[str, Any]] = {
        "llama": {}, "qwen3": HEAD_NORMS, "tied": TIED, "dropout": {"attention_dropout": 0.1},
        "key-heads": {"num_key_value_heads": 4}, "mixtral": MIXTRAL | {"num_hidden_layers": 4},
    }  # fmt: skip
    full, lora, three = (None,), (None, LORA), (None, BESIDE_EXPERTS, ON_EXPERTS)
    mixed, both = ("bf16",), ("fp32", "bf16")
    quarters = {"stages": "0 | 1 | 2 | 3", "bubble": "6 of 12"}
    squares = {"mesh": "2 x 2", "mesh-copies": "2"}
    table: Sequence[tuple[str, Axes, str, Sequence[str], Sequence[Any], Mapping[str, str], bool]] = (
        # (strategies, axes, models, precisions, adapters, what claims have seen, whether gradients are exact)
        (distributed, TWO["context"], "llama qwen3", mixed, lora, {}, False),
        ("ddp fsdp2", COPIED["context"], "llama", mixed, lora, {}, False),
        ("fsdp2 fsdp1 zero3", SHARDED["context"], "llama", mixed, lora, {}, False),
        ("fsdp2 zero2", {"context": 4}, "llama", mixed, lora, {}, False),
        ("fsdp2", TWO["tensor"], "llama qwen3", both, (None, EVERYWHERE), HALVES, True),
        ("fsdp2", SHARDED["tensor"], "llama qwen3", mixed, lora, HALVES, False),
        ("fsdp2", {"tensor": 4}, "key-heads", mixed, lora, {"layers-divided": "4"}, False),
        ("fsdp2", SHARDED["tensor"] | {"replicate": 2}, "llama", mixed, full, HALVES, False),
        ("ddp", TWO["pipeline"], "mixtral", mixed, (ON_EXPERTS,), STAGES, False),
        ("fsdp2", SHARDED["pipeline"], "mixtral", mixed, (ON_EXPERTS,), STAGES, False),
        ("ddp", COPIED["pipeline"], "llama qwen3 tied dropout", mixed, lora, STAGES, False),
        ("fsdp2", SHARDED["pipeline"], "llama qwen3 tied dropout", mixed, lora, STAGES, False),
        ("ddp", {"pipeline": 4}, "llama qwen3 tied dropout", mixed, lora, quarters, False),
        ("ddp", {"pipeline": 2, "replicate": 3}, "tied", ("fp32",), full, STAGES, False),
        ("fsdp2", SHARDED["pipeline"] | {"replicate": 2}, "tied", mixed, full, STAGES, False),
        ("fsdp2", TWO["expert"], "llama", both, three, {}, True),
        ("fsdp2", COPIED["expert"], "llama", mixed, three, {}, False),
        ("fsdp2", {"expert": 4}, "llama", mixed, three, {}, False),
        ("fsdp2", SHARDED["expert"], "llama", mixed, three, {}, False),
        ("fsdp2", PAIR, "llama qwen3", both, (None, EVERYWHERE), HALVES, True),
        ("fsdp2", PAIR | {"shard": 2}, "llama", mixed, lora, HALVES, False),
        ("fsdp1 fsdp2 zero3", HYBRID, "llama", mixed, full, squares, False),
    )
    for names, axes, of, precisions, adapters, seen, exact in table:
        for name in names.split():
            for model in of.split():
                for precision in precisions:
                    for adapter in adapters:
                        sections = {"precision": precision, "adapter": adapter, "model": {"config": models[model]}}
                        which = model if "expert" not in axes or model != "llama" else "mixtral"
                        yield Row(f"{which}-{precision}-{_kind(adapter)}", name, axes, sections, seen, exact)
    for name in ("fsdp1", "fsdp2", "zero3"):
        yield Row("recomputed-lora", name, HYBRID, OPTIONS["recomputed-lora"], squares)
    for name, option in (("zero2", "packed"), ("fsdp2", "fused")):
        yield Row(option, name, TWO["context"], OPTIONS[option], exact=True)
    yield Row("tied-dropout", "ddp", TWO["pipeline"], OPTIONS["tied-dropout"], COUNTED, exact=True)
    for option in ("recomputed", "recomputed-lora"):
        sections = OPTIONS[option] | {"model": {"config": HEAD_NORMS}}
        yield Row(f"qwen3-{option}", "fsdp2", TWO["tensor"], sections, HALVES, exact=True)


NIGHTLY = [*_with_options(), *_of_families(), *_of_sizes()]


# ------------------------------------------------------------------ faults

FAULTS = {"context": context, "tensor": layers, "pipeline": stages, "expert": experts, "hybrid": mesh}


def faults_of(*axes: str) -> list[str]:
    modules = {FAULTS[axis].__name__ for axis in axes}
    return [fault for fault, kind in faults().items() if kind.__module__ in modules]


@dataclass(frozen=True)
class Killed:
    """``row``: the recipe that the fault is put into; a fault brings the mesh that it needs where the recipe has none.
    ``also``: another diagnosis, where nothing tells the two apart."""

    fault: str
    row: Row
    ranks: int
    also: str = ""

    @property
    def id(self) -> str:
        return f"{self.fault}-in-{self.row.id}"


OF_TWO = [
    Killed("parts-key-heads-mixed", Row("two", "fsdp2", TWO["context"]), 2),
    Killed("layers-hidden-gradients-apart", Row("two", "fsdp2", TWO["tensor"]), 2),
    Killed("stages-divided-by-micro-batches", Row("two", "ddp", TWO["pipeline"]), 2),
    Killed("experts-results-misplaced", Row("two", "fsdp2", TWO["expert"]), 2),
]
"""One of each axis, on two ranks."""
ELSEWHERE = {"parts-same-masks", "layers-of-other-samples", "parts-key-heads-mixed"}
"""Faults of rows or layers that cannot be where both are divided: dropout in attention, which divided layers do not
have; samples of copies; key heads that a fault knows by their number, which here is that of a rank's query heads."""


def _killed() -> Iterator[Killed]:
    for axis in FAULTS:
        model = {"model": {"config": config_for({axis: 2})}} if axis in ("tensor", "pipeline") else {}
        for fault in faults_of(axis):
            for name in faults()[fault].strategies.names():
                for precision in ("fp32", "bf16") if axis == "expert" else ("fp32",):
                    yield Killed(
                        fault, Row(precision, name, {}, {"precision": precision} | model),
                        2 if axis in ("context", "tensor") else 4,
                    )  # fmt: skip
    for fault in faults_of(*PAIR):
        if fault not in ELSEWHERE:
            # There are as many ranks of rows as of layers.
            also = "gradients-scaled-by-layers" if fault == "parts-averaged" else ""
            yield Killed(fault, Row("pair", "fsdp2", PAIR), 4, also)


KILLED = list(_killed())


def params(rows: Iterable[Any], ranks: Callable[[int], bool], default: Iterable[Any] = ()) -> list[Any]:
    """Those with such a number of ranks, those of ``default`` in the default set."""
    marked = [pytest.param(one, id=one.id, marks=pytest.mark.nightly) for one in rows if ranks(one.ranks)]
    return [*(pytest.param(one, id=one.id) for one in default if ranks(one.ranks)), *marked]
