"""What is read of a model without torch is what is in force: a key of its config, a nested one, or its class's default.
Over every family of the table of families."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from cases import every_case
from families import EVERY_FAMILY
from media import SEEING
from toolkit.model.silence import silence_libraries
from toolkit.options.varlen.spec import why_not_varlen
from toolkit.recipe.fusable import why_not_fusable
from toolkit.recipe.model_facts import UNKNOWN, ModelFacts
from toolkit.recipe.quantisable import why_not_trainable
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve
from toolkit.strategies.layouts.context.spec import attention_heads
from toolkit.strategies.layouts.expert.spec import expert_count

KEYS = (
    "num_attention_heads", "num_key_value_heads", "intermediate_size", "num_hidden_layers", "head_dim", "hidden_size",
    "attention_dropout", "attn_pdrop", "tie_word_embeddings", "output_router_logits", "alibi", "hidden_act",
    "final_logit_softcapping", "attn_logit_softcapping", "logits_scaling", "vocab_size", "num_local_experts",
    "n_routed_experts", "num_experts",
)  # fmt: skip
GEMMA = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 64,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
SEEN: dict[str, dict[str, Any]] = {
    "gemma3, text": {"model_type": "gemma3_text", **GEMMA},
    "gemma3, text, capped": {"model_type": "gemma3_text", **GEMMA, "final_logit_softcapping": 3.0},
    "gemma3, image and text": {"model_type": "gemma3", "text_config": GEMMA, "vision_config": VISION},
    "gemma2": {"model_type": "gemma2", **GEMMA},
    "gemma2, null": {"model_type": "gemma2", **GEMMA, "final_logit_softcapping": None},
    "granite": {"model_type": "granite", **GEMMA},
    "granite, scaled": {"model_type": "granite", **GEMMA, "logits_scaling": 8.0},
}


def every_config() -> dict[str, dict[str, Any]]:
    families = {name: model["config"] for name, model in (EVERY_FAMILY | SEEING).items() if "config" in model}
    return families | SEEN


def disagreements(config: dict[str, Any]) -> list[str]:
    """Where the facts of a config and transformers' own config differ."""
    import transformers

    right = transformers.AutoConfig.for_model(**config)
    facts, found = ModelFacts(config, None), []
    for part, theirs in ((facts, right), (facts.text, right.get_text_config())):
        for key in KEYS:
            ours = part.value(key)
            if ours is UNKNOWN or ours is None:
                continue  # not said as a constant: derived by the class
            expected = getattr(theirs, key, UNKNOWN)
            if expected is not UNKNOWN and ours != expected:
                found.append(f"{key}: {ours}, transformers has {expected}")
    return found


def test_the_values_of_every_family_are_those_of_its_class() -> None:
    """Also where the config says none of them."""
    silence_libraries()
    found = {}
    for name, config in every_config().items():
        bare = {"model_type": config["model_type"]}
        if wrong := [*disagreements(config), *disagreements(bare)]:
            found[name] = wrong
    assert not found


def changes_logits(config: dict[str, Any], auto: Any) -> bool | None:
    """Whether the model's logits are other than its head's output, bit by bit; None where it has no linear head."""
    import transformers

    torch.manual_seed(0)
    made = transformers.AutoConfig.for_model(**config)
    with torch.no_grad():
        model: Any = auto.from_config(made).eval()
        head = model.get_output_embeddings()
        if type(head) is not nn.Linear:
            return None
        head.weight.mul_(20)  # so that a cap caps
        outputs: list[torch.Tensor] = []
        head.register_forward_hook(lambda module, args, output: outputs.append(output))
        logits = model(input_ids=torch.arange(4, 20)[None] % 90, use_cache=False).logits
    return not any(one.shape == logits.shape and torch.equal(one, logits) for one in outputs)


def judged(config: dict[str, Any]) -> tuple[str | None, bool | None]:
    """Whether ``loss: fused`` is refused, and whether the model changes its logits."""
    from transformers import AutoModelForCausalLM

    recipe = Recipe.model_validate({"model": {"config": config}, "data": {"train": "x"}, "loss": "fused"})
    reason = why_not_fusable(recipe, ModelFacts(config, None))
    return reason, changes_logits(config, AutoModelForCausalLM)


@every_case("name", list(SEEN))
def test_the_fused_loss_is_refused_where_logits_change(name: str) -> None:
    silence_libraries()
    reason, changes = judged(SEEN[name])
    assert (reason is not None) == changes, (name, reason)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in EVERY_FAMILY if EVERY_FAMILY[name].get("task") is None])
def test_over_every_causal_family(name: str) -> None:
    silence_libraries()
    config = EVERY_FAMILY[name]["config"]
    reason, changes = judged(config)
    assert changes is None or (reason is not None) == changes, reason


@every_case(
    ("config", "heads"),
    [({"model_type": "llama"}, 32), ({"model_type": "gpt2"}, 12), ({"model_type": "gpt2", "n_head": 4}, 4),
     ({"model_type": "falcon"}, 71), ({"model_type": "t5"}, 8), ({"model_type": "gemma3", "text_config": {}}, 8)],
)  # fmt: skip
def test_attention_heads_of_a_class_s_default(config: dict[str, Any], heads: int) -> None:
    assert attention_heads(ModelFacts(config, None).text) == heads


def test_a_default_of_a_class_refuses_no_mesh_and_no_attention() -> None:
    """Each was refused: the config does not say what its class does."""
    base: dict[str, Any] = {
        "data": {"train": "x", "packing": True}, "tokenizer": {"path": "none"}, "precision": "bf16",
        "run": {"max_steps": 1},
    }  # fmt: skip

    def recipe(config: dict[str, Any], **sections: Any) -> Recipe:
        return Recipe.model_validate(base | {"model": {"config": config} | sections.pop("model", {})} | sections)

    plain = {"model_type": "llama", "vocab_size": 96}
    machine = {"device": "cpu", "processes": 2}
    for axis, name in (("tensor", "fsdp2"), ("context", "ddp"), ("pipeline", "ddp")):
        resolve(recipe(plain, machine=machine, strategy={"name": name, "mesh": {axis: 2}}), "r", device="cpu")
    gemma: dict[str, Any] = {"model_type": "gemma2", "attn_logit_softcapping": None}
    varlen = {"model": {"attention": "varlen"}}
    assert why_not_varlen(recipe(gemma, **varlen), ModelFacts(gemma, None), "cpu") is None
    capped = {"model_type": "gemma2"}
    assert "caps its scores" in str(why_not_varlen(recipe(capped, **varlen), ModelFacts(capped, None), "cpu"))
    gpt2 = {"model_type": "gpt2"}
    assert "attn_pdrop is 0.1" in str(why_not_varlen(recipe(gpt2, **varlen), ModelFacts(gpt2, None), "cuda"))
    assert expert_count(ModelFacts({"model_type": "mixtral"}, None)) == 8
    assert ModelFacts({"model_type": "gemma"}, None).value("tie_word_embeddings") is True


def test_attention_that_draws_from_numpy_is_refused() -> None:
    """BigBird's first layer draws its blocks apart on each rank, and again where it is recomputed."""
    for own in ({}, {"attention_type": "block_sparse"}):
        reason = why_not_trainable(ModelFacts({"model_type": "big_bird", **own}, None))
        assert reason is not None
        assert "original_full" in reason
    full = ModelFacts({"model_type": "big_bird", "attention_type": "original_full"}, None)
    assert why_not_trainable(full) is None
