"""Adapters of other methods than LoRA: what virtual tokens learn, what is exported, and what is refused."""

from __future__ import annotations

import copy
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import model_types
from cases import every_case
from families import EVERY_FAMILY
from jobs import resolved_from
from media import SEEING
from tiny import LLAMA, recipe_dict
from toolkit.errors import InputError
from toolkit.model.adapters import add_adapter
from toolkit.model.load import load_base
from toolkit.recipe.adapter_methods import METHODS
from toolkit.recipe.schema import Adapter
from toolkit.threads import torch_threads
from toolkit.training.card import model_card
from toolkit.training.export import write_model
from toolkit.training.loss import loss_sum
from toolkit.training.preparation import prepare_model
from toolkit.verification.cases.twin import twin_adapter


def resolved(root: Path, adapter: dict[str, Any], **sections: Any) -> Any:
    alone = {"strategy": {"name": "single"}, "machine": {"processes": 1}}
    return resolved_from(recipe_dict(root, adapter=adapter, **(alone | sections)))


def batch() -> dict[str, torch.Tensor]:
    """Two rows, one padded; the first token of neither is predicted."""
    ids = torch.randint(3, 290, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def test_an_adapter_is_added_without_a_warning_that_is_not_the_users(tiny_root: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        prepare_model(resolved(tiny_root, {"r": 2}), 0).model.save_pretrained(tmp_path / "adapter")
        prepare_model(resolved(tiny_root, {"path": str(tmp_path / "adapter")}), 0)


@pytest.mark.parametrize("method", ["prompt-tuning", "p-tuning"])
def test_virtual_tokens_are_in_front_of_the_sample_and_are_not_learned(method: str, tiny_root: Path) -> None:
    """From the definition: the embeddings of the prompt, then those of the sample, without PEFT's forward."""
    recipe = resolved(tiny_root, {"method": method, "options": {"num_virtual_tokens": 3}})
    model: Any = prepare_model(recipe, 0).model.eval()
    tensors = batch()
    ours = loss_sum(model, model.config, tensors, "causal-lm")
    base = load_base(recipe, 0).eval()
    embedded = base.get_input_embeddings()(tensors["input_ids"])  # type: ignore[operator]
    prompt = model.get_prompt(2)
    assert prompt.shape == (2, 3, 32)
    mask = torch.cat([torch.ones(2, 3, dtype=torch.int64), tensors["attention_mask"]], dim=1)
    logits = base(inputs_embeds=torch.cat([prompt, embedded], dim=1), attention_mask=mask).logits[:, 3:]
    right = functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), tensors["labels"][:, 1:].flatten(), ignore_index=-100, reduction="sum"
    )
    assert ours.item() == pytest.approx(right.item(), rel=1e-6)
    assert ours.item() != pytest.approx(loss_sum(base, model.config, tensors, "causal-lm").item(), rel=1e-5)
    ours.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    "adapter",
    [
        {"method": "vera", "options": {"projection_prng_key": 5}},
        {"method": "randlora"},
        {"method": "fourierft", "options": {"n_frequency": 50}},
        {"method": "shira", "r": 4},
        {"method": "lora", "r": 4, "options": {"init_lora_weights": "pissa"}},
        {"method": "prefix-tuning", "options": {"num_virtual_tokens": 3}},
    ],
    ids=lambda adapter: adapter["method"],
)
def test_an_export_answers_as_the_trained_adapter(adapter: dict[str, Any], tiny_root: Path, tmp_path: Path) -> None:
    """Loaded by PEFT alone, on a base loaded anew; random projections and indices with it."""
    from peft import PeftModel

    recipe = resolved(tiny_root, adapter)
    model: Any = prepare_model(recipe, 0).model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    tensors = {name: tensor for name, tensor in batch().items() if name != "labels"}
    write_model(copy.deepcopy(model), recipe.recipe, tmp_path / "adapter", merged=False)
    torch.manual_seed(99)
    loaded = PeftModel.from_pretrained(load_base(recipe, 0), str(tmp_path / "adapter")).eval()
    with torch.no_grad():
        live, found = model(**tensors).logits, loaded(**tensors).logits
        assert not torch.allclose(live, load_base(recipe, 0).eval()(**tensors).logits, atol=1e-3)
        assert torch.allclose(found, live, atol=1e-5, rtol=0)
        if METHODS[adapter["method"]].merges:
            merged = model.merge_and_unload()(**tensors).logits
            assert torch.allclose(merged, live, atol=1e-4, rtol=0)


@every_case("method", [name for name, method in METHODS.items() if method.why_not is None])
@pytest.mark.usefixtures("launches")
def test_what_several_blocks_share_is_known(method: str, tiny_root: Path) -> None:
    """FSDP shards each block by itself: on a model of two blocks it may work by luck."""
    config = LLAMA | {"num_hidden_layers": 4}
    asked = Adapter.model_validate({"method": method, "options": dict(METHODS[method].required)})
    recipe = resolved(tiny_root, twin_adapter(asked.model_dump(), config), model={"config": config})
    model: Any = add_adapter(load_base(recipe, 0), recipe)
    blocks: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad and ".layers." in name:
            blocks.setdefault(id(parameter), set()).add(name.split(".layers.")[1].split(".")[0])
    assert METHODS[method].shares == any(len(found) > 1 for found in blocks.values())


@every_case("method", [name for name, method in METHODS.items() if method.why_not is None])
@pytest.mark.usefixtures("launches")
def test_an_adapter_starts_alike_on_one_thread_and_on_two(method: str, tiny_root: Path) -> None:
    """Ranks and a plain loop have threads of their own. FRoD's projections, eigenvectors of base weights, differed by
    0.96, and a run that went on with other threads trained on other projections."""
    asked = Adapter.model_validate({"method": method, "options": dict(METHODS[method].required)})
    recipe = resolved(tiny_root, twin_adapter(asked.model_dump(), LLAMA))
    found = []
    for number in (1, 2):
        with torch_threads(number):
            model: Any = add_adapter(load_base(recipe, 0), recipe)
            assert torch.get_num_threads() == number
            found.append({**dict(model.named_parameters()), **dict(model.named_buffers())})
    for name, tensor in found[0].items():
        # Decompositions that no sign is free in (OSF, PSOFT, TinyLoRA) round differently: 5e-7 here, of weights of 0.1.
        assert torch.allclose(tensor, found[1][name], atol=1e-5, rtol=0), name


def test_experts_with_fused_weights_are_adapted(tiny_root: Path) -> None:
    names = ["experts.gate_up_proj", "experts.down_proj"]
    adapter = {"r": 2, "target_modules": ["q_proj"], "options": {"target_parameters": names}}
    model: Any = prepare_model(resolved(tiny_root, adapter, model=EVERY_FAMILY["mixtral"]), 0).model
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    experts = {name for name in trained if ".experts." in name}
    assert len(experts) == 2 * 2 * 2, "two layers, two weights, A and B"
    for name in experts:
        if "lora_B" in name:
            torch.nn.init.normal_(trained[name])
    tensors = batch()
    tensors["input_ids"] = tensors["input_ids"] % 96
    loss_sum(model, model.config, tensors | {"labels": tensors["labels"].clamp(max=95)}, "causal-lm").backward()
    assert all(trained[name].grad is not None and trained[name].grad.any() for name in experts)


PHIMOE = {"model_type": "phimoe", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300, "num_local_experts": 4,
          "max_position_embeddings": 64}  # fmt: skip


@every_case(
    ("config", "method"), product([SEEING["llama4"]["text_config"] | {"vocab_size": 300}, PHIMOE], ["lora", "oft"])
)
def test_routers_that_return_choices_are_left_alone(config: dict[str, Any], method: str, tiny_root: Path) -> None:
    """An adapter takes what its layer returns for a tensor: Llama 4 ended in its first forward."""
    recipe = resolved(tiny_root, {"method": method, "target_modules": "all-linear"}, model={"config": config})
    model: Any = prepare_model(recipe, 0).model
    adapted = {name for name, p in model.named_parameters() if p.requires_grad}
    assert any("q_proj" in name for name in adapted)
    assert not any("router" in name or "lm_head" in name for name in adapted)
    loss_sum(model, model.config, batch(), "causal-lm").backward()


@pytest.mark.parametrize("task", ["sequence-classification", "token-classification"])
def test_what_a_head_s_name_ends_is_trained_whole(task: str, tiny_root: Path) -> None:
    """DistilBERT's pre_classifier, which PEFT takes for a head: with all-linear it was to be both, and refused."""
    config = EVERY_FAMILY["distilbert"]["config"]
    data = {"format": "tokens"} if task == "token-classification" else {}
    model = {"config": config, "task": task, "num_labels": 3}
    recipe = recipe_dict(tiny_root, model=model, data=data, adapter={"r": 2, "target_modules": "all-linear"})
    resolved = resolved_from(recipe)
    adapted = add_adapter(load_base(resolved), resolved)
    trained = {name.split(".")[2] for name, p in adapted.named_parameters() if p.requires_grad and "lora_" not in name}
    assert trained == {"classifier", *(["pre_classifier"] if task == "sequence-classification" else [])}
    assert not [name for name, _ in adapted.named_parameters() if "classifier" in name and "lora_" in name]


def test_layers_that_multiply_otherwise_are_left_alone_and_refused_by_name(tiny_root: Path) -> None:
    """DeepSeek V4 multiplies by groups in a class made of nn.Linear: an adapter beside it ended the first forward."""
    model = {"config": model_types.small_config("deepseek_v4", "AutoModelForCausalLM")[0]}
    recipe = resolved(tiny_root, {"target_modules": "all-linear"}, model=model)
    adapted = {name for name, p in prepare_model(recipe, 0).model.named_parameters() if p.requires_grad}
    assert any("o_b_proj" in name for name in adapted)
    assert not any("o_a_proj" in name for name in adapted)
    named = resolved(tiny_root, {"target_modules": ["o_a_proj", "o_b_proj"]}, model=model)
    with pytest.raises(InputError, match=r"adapter\.target_modules: 'o_a_proj' names layers of class \w+GroupedLinear"):
        prepare_model(named, 0)


@every_case(
    ("adapter", "sections", "message"),
    [
        (
            {"options": {"target_parameters": ["experts.gate"]}},
            {"model": EVERY_FAMILY["mixtral"]},
            "adapter.options.target_parameters: 'experts.gate' matches no parameter; weights of three dimensions in "
            "this model: experts.down_proj, experts.gate_up_proj",
        ),
        ({"method": "vblora", "options": {"vector_length": 7}}, {}, "adapter (vblora): `in_features` "),
        (
            {"method": "hra", "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
            {"model": {"config": LLAMA | {"tie_word_embeddings": True}}},
            "lm_head shares its weight with another module",
        ),
    ],
)
def test_what_the_model_does_not_have_is_reported(
    adapter: dict[str, Any], sections: dict[str, Any], message: str, tiny_root: Path
) -> None:
    recipe = resolved(tiny_root, adapter, **sections)
    with pytest.raises(InputError) as caught:
        add_adapter(load_base(recipe, 0), recipe)
    assert message in str(caught.value)


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_a_second_attempt_at_an_adapter_is_like_the_first(method: str, tiny_root: Path) -> None:
    """A base that cannot be loaded by part is given its adapter again, whole. PEFT writes the name of a tied table
    into modules_to_save in place of the head's, and then the head kept its old weights."""
    adapter = {"method": method, "r": 2, "modules_to_save": ["lm_head"]}
    recipe = resolved(tiny_root, adapter, model={"config": LLAMA | {"tie_word_embeddings": True}})
    for attempt in range(2):
        model: Any = add_adapter(load_base(recipe, 0), recipe).base_model.model
        assert model.lm_head.weight is model.model.embed_tokens.weight, attempt
        assert model.lm_head.weight.requires_grad
        assert recipe.recipe.adapter.modules_to_save == ["lm_head"]


def test_an_adapter_of_another_method_is_not_loaded(tiny_root: Path, tmp_path: Path) -> None:
    saved = resolved(tiny_root, {"method": "ia3"})
    add_adapter(load_base(saved, 0), saved).save_pretrained(tmp_path)
    other = resolved(tiny_root, {"method": "lora", "path": str(tmp_path)})
    with pytest.raises(InputError, match=r"is an adapter of method ia3, .*; set adapter\.method: ia3"):
        add_adapter(load_base(other, 0), other)
    same = resolved(tiny_root, {"method": "ia3", "path": str(tmp_path)})
    assert any(p.requires_grad for p in add_adapter(load_base(same, 0), same).parameters())


def test_a_card_names_what_the_method_has(tiny_root: Path) -> None:
    found = resolved(tiny_root, {"method": "prompt-tuning", "options": {"num_virtual_tokens": 3}})
    manifest = {"step": 1, "strategy": "single", "world_size": 1, "versions": {}}
    assert "| trained | prompt-tuning, num_virtual_tokens 3 |" in model_card(
        "adapter", found.recipe, found, manifest, Path("run")
    )


def test_no_method_draws_a_progress_bar(tiny_root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """FRoD draws one by default, on every rank, in the middle of the screen of `train`."""
    prepare_model(resolved(tiny_root, {"method": "frod"}), 0)
    assert "joint decomposition" not in capfd.readouterr().err
