"""PEFT methods by their name in a recipe: which keys they take, what they need, and what they cannot do. Plain data.

A method's options are the fields of PEFT's own config class, see ``adapter_options.py``. docs/measurements/
peft-methods.md is measured for every row of the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from pydantic_core import PydanticCustomError

Prompt = Literal["tokens", "cache"]
"""«tokens»: vectors in front of the input's embeddings, so that outputs are longer than the input. «cache»: keys and
values in front of those of each layer."""

_TARGETS = {"target_modules": "target_modules", "modules_to_save": "modules_to_save"}
_LINEAR = "all-linear"


@dataclass(frozen=True, kw_only=True)
class Method:
    """One PEFT method. ``keys``: the keys of ``adapter`` that it takes, and the fields of PEFT's config class that
    they set."""

    name: str
    peft_type: str
    """PEFT's ``PeftType``; in lower case the folder below ``peft/tuners``."""
    keys: Mapping[str, str]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of ``adapter`` keys that the recipe does not set; PEFT's own where there is none."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields that the method sets."""
    required: Mapping[str, Any] = field(default_factory=dict)
    """Options without which PEFT cannot create it, with an example."""
    prompt: Prompt | None = None
    """Whether it changes the input, and how."""
    why_not: str | None = None
    """Why the training loop cannot train it, and the alternative."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Options that the training loop cannot use, with the reason."""
    merges: bool = True
    """Whether it can be merged into the base weights."""
    layers_called: bool = False
    """Its trained weights are those of modules that are called, which FSDP1 gathers; False: of containers that an
    adapter reads."""
    shares: bool = False
    """Layers of several blocks read one trained weight."""
    hooks: bool = False
    """It changes gradients in hooks on its weights; a strategy that replaces the weights never runs them."""
    eigenvectors: bool = False
    """Its frozen projections are eigenvectors of base weights: signs and bases that the last bit of a sum decides."""
    starts_from: bool = True
    """Training can start from a saved adapter (``adapter.path``): everything that trains is saved."""
    packed: bool = False
    """It can wrap layers whose weights are packed in 4 bits: it calls them, and reads no value of their weights."""
    twin: Mapping[str, int] = field(default_factory=dict)
    """For the small model that `verify` trains: the largest value of an option (or of ``r``) that fits its layers."""


def _linear(name: str, *, alpha: str | None = None, dropout: str | None = None, r: bool = True, **own: Any) -> Method:
    """A method whose adapters wrap layers, all linear ones by default."""
    keys = dict(_TARGETS)
    for key, its in (("r", "r" if r else None), ("alpha", alpha), ("dropout", dropout)):
        if its is not None:
            keys[key] = its
    values: dict[str, Any] = {"peft_type": _peft_type(name), "defaults": {"target_modules": _LINEAR}} | own
    return Method(name=name, keys=MappingProxyType(keys), **values)


def _prompt(name: str, prompt: Prompt = "tokens", **own: Any) -> Method:
    values: dict[str, Any] = {
        "required": {"num_virtual_tokens": 20},
        "twin": {"num_virtual_tokens": 8},
        "merges": False,
        "layers_called": True,
        "packed": True,
        "refused": {"modules_to_save": "under virtual tokens the whole model stays frozen"},
    } | own
    return Method(name=name, peft_type=_peft_type(name), keys={}, prompt=prompt, **values)


def _peft_type(name: str) -> str:
    return name.upper().replace("-", "_")


def _refused(name: str, why_not: str) -> Method:
    return Method(name=name, peft_type=_peft_type(name), keys={}, why_not=why_not)


DATA_FIRST = "is computed from samples before training, which the training loop does not do"
_OWN_LOSS = "adds a term to the loss, which is divided by supervised tokens here"
_SVD = {"r": 8}
_LORA_REFUSED = {
    "eva_config": DATA_FIRST,
    "corda_config": DATA_FIRST,
    "lora_ga_config": DATA_FIRST,
    "kasa_config": _OWN_LOSS,
    "monteclora_config": _OWN_LOSS,
    "loftq_config": "quantises the base in another way than adapter.method: qlora does; use qlora",
    "arrow_config": "combines adapters that are trained already",
    "use_qalora": "requires a GPTQ base; use adapter.method: qlora",
    "qalora_group_size": "requires a GPTQ base; use adapter.method: qlora",
    "alora_invocation_tokens": "adapts only tokens after a marker in the prompt, which the random samples of `toolkit "
    "verify` do not have",
    "layer_replication": "repeats blocks, whose frozen weights would have several names",
    "megatron_config": "is for Megatron's layers",
    "megatron_core": "is for Megatron's layers",
    "runtime_config": "is for inference",
    "velora_config": "is not exact: it compresses the activations of the backward",
}
_LORA: dict[str, Any] = {
    "peft_type": "LORA",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "defaults": {"r": 16, "alpha": 32.0, "dropout": 0.0, "target_modules": _LINEAR},
    "refused": _LORA_REFUSED,
}

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        _linear("lora", layers_called=True, packed=True, **_LORA),
        _linear("dora", fixed={"use_dora": True}, **_LORA),
        _linear("qlora", layers_called=True, packed=True, **_LORA),
        _refused(
            "adalora",
            "adds an orthogonality term to the loss and reads whole gradients after each step, which are sharded; use "
            "lora, or dora",
        ),
        _refused("adamss", "needs scikit-learn to choose its subspaces and is not verified; use lora"),
        Method(
            name="adaption-prompt",
            peft_type="ADAPTION_PROMPT",
            packed=True,
            keys={},
            required={"adapter_len": 10, "adapter_layers": 8},
            merges=False,
            twin={"adapter_len": 4, "adapter_layers": 2},
        ),
        _linear("beft", packed=True, r=False, merges=False),
        _linear("boft", packed=True, r=False, dropout="boft_dropout", twin={"boft_block_size": 4, "boft_block_num": 4}),
        _linear("c3a", packed=True, r=False, twin={"block_size": 16}),
        _prompt("cartridge", "cache", layers_called=False, twin={"num_virtual_tokens": 8, "num_frozen_tokens": 2}),
        _refused("cpt", "weights the loss by positions of a prompt of its own; use prompt-tuning"),
        _linear("deft", alpha="alpha", dropout="deft_dropout"),
        _linear("delora"),
        _linear("fourierft", packed=True, r=False, twin={"n_frequency": 100}),
        _linear("frod", r=False, dropout="frod_dropout", eigenvectors=True, fixed={"progressbar": False}),
        _linear("glora"),
        _linear("gralora", packed=True, alpha="alpha", dropout="gralora_dropout"),
        _linear("hira", dropout="hira_dropout"),
        _linear("hra", twin={"r": 8}),
        _linear("ia3", packed=True, r=False, defaults={}),
        _linear("lily", packed=True, merges=False, shares=True),
        _linear("ln-tuning", packed=True, r=False, defaults={}, layers_called=True),
        _linear("loha", alpha="alpha"),
        _linear("lokr", alpha="alpha"),
        _linear("miss", dropout="miss_dropout", twin={"r": 8}),
        _refused("multitask-prompt-tuning", "needs the number of a task with each sample; use prompt-tuning"),
        _linear("oft", packed=True, layers_called=True, twin={"r": 4, "oft_block_size": 16}),
        _linear("osf", r=False, hooks=True),
        _prompt("p-tuning", starts_from=False),
        _linear("peanut"),
        _refused("poly", "needs the number of a task with each sample; use lora"),
        _prompt("prefix-tuning", "cache"),
        _prompt("prompt-tuning"),
        _linear("psoft", alpha="psoft_alpha", dropout="psoft_dropout", twin=_SVD),
        _linear("pvera", packed=True, dropout="pvera_dropout"),
        _linear("randlora", packed=True, alpha="randlora_alpha", dropout="randlora_dropout"),
        _linear("road", packed=True, r=False, twin={"group_size": 16}),
        _refused("shadow", "trains a second model with a loss of its own; use lora"),
        _linear("shira", twin={"r": 4}),
        _linear("supertuning", alpha="lora_alpha", dropout="lora_dropout"),
        _linear("tinylora", dropout="tinylora_dropout", shares=True),
        Method(
            name="trainable-tokens",
            peft_type="TRAINABLE_TOKENS",
            packed=True,
            keys={"target_modules": "target_modules"},
            required={"token_indices": [0, 1]},
        ),
        _linear("unilora", packed=True, dropout="unilora_dropout", shares=True),
        _linear(
            "vblora", packed=True, dropout="vblora_dropout", shares=True, twin={"vector_length": 16, "num_vectors": 32}
        ),
        _linear("vera", packed=True, dropout="vera_dropout"),
        _linear("waveft", packed=True, r=False, twin={"n_frequency": 100}),
        _refused("xlora", "mixes adapters that are trained already; train them with lora"),
    )
}

REBUILT = ("pissa", "olora", "orthogonal", "mica")
"""``init_lora_weights`` that decompose the base weight: the rank is at most that of the smallest layer."""


def method_names() -> tuple[str, ...]:
    """Every name, the three kinds of LoRA first."""
    return tuple(METHODS)


def known_method(name: str) -> str:
    """Validate a method's name, also in PEFT's own spelling (``LN_TUNING``); for pydantic."""
    plain = name.lower().replace("_", "-")
    if plain not in METHODS:
        *most, last = map(repr, METHODS)
        expected = f"{', '.join(most)} or {last}"
        raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})
    return plain


def list_methods(schema: dict[str, Any]) -> None:
    """Put the names into the JSON schema of the key; for pydantic."""
    schema["enum"] = list(method_names())


def adapter_reads_base(adapter: Any) -> bool:
    """Whether PEFT makes an adapter (the section of a recipe) out of values of the base, so that it must be whole."""
    start = adapter.options.get("init_lora_weights", True)
    return bool(METHODS[adapter.method].fixed.get("use_dora")) or not (isinstance(start, bool) or start == "gaussian")
