"""PEFT methods in a recipe: every one that PEFT has is known, and its options are checked with file, line and key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cases import every_case
from tiny import LLAMA, recipe_dict
from toolkit.errors import InputError
from toolkit.recipe.adapter_methods import METHODS
from toolkit.recipe.adapter_options import adapter_problems, options_of
from toolkit.recipe.load import load_recipe
from toolkit.recipe.schema import Adapter, Recipe
from toolkit.strategies import resolve


def written(tmp_path: Path, adapter: str) -> Path:
    file = tmp_path / "recipe.yaml"
    file.write_text(f"model: {{path: some/model}}\ndata: {{train: x}}\nadapter:\n{adapter}", encoding="utf-8")
    return file


@pytest.mark.upstream
def test_every_method_of_peft_is_known_with_the_fields_of_its_config() -> None:
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    configs = {kind.value: made for kind, made in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    assert {method.peft_type for method in METHODS.values()} == set(configs)
    for name, method in METHODS.items():
        fields = set(configs[method.peft_type].__dataclass_fields__)
        assert fields >= set(method.keys.values()) | set(method.fixed) | set(method.required), name
        assert fields >= set(options_of(name)) | set(method.refused), name
        assert fields >= set(method.twin), name
        if method.why_not is None:
            assert len(options_of(name)) == len(
                fields
                - set(method.keys.values()) - set(method.fixed) - set(method.refused)
                - {"task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
                   "inference_mode"}
                - ({"use_dora", "ensure_weight_tying"} if method.peft_type == "LORA" else set())
            ), name  # fmt: skip


def test_a_recipe_of_an_earlier_version_means_the_same() -> None:
    adapter = Adapter.model_validate({})
    assert (adapter.method, adapter.r, adapter.alpha, adapter.dropout) == ("lora", 16, 32.0, 0.0)
    assert adapter.target_modules == "all-linear"
    assert adapter.model_fields_set == set()


@every_case("name", [name for name, method in METHODS.items() if method.why_not is None])
def test_a_recipe_survives_being_written_and_read(name: str) -> None:
    adapter = Adapter.model_validate({"method": name, "options": dict(METHODS[name].required)})
    again = Adapter.model_validate(adapter.model_dump(mode="json"))
    assert adapter_problems(adapter) == adapter_problems(again) == []
    assert again == adapter


@every_case(
    ("adapter", "line", "text"),
    [
        ("  {method: ia3, r: 8}", 4, "adapter.r: ia3 has no such setting; remove it (ia3 takes target_modules,"),
        ("  method: ln-tuning\n  dropout: 0.0", 5, "adapter.dropout: ln-tuning has no such setting"),
        ("  method: lora\n  options:\n    use_rs_lora: true", 6, "has no option use_rs_lora; did you mean use_rslora?"),
        ("  method: lora\n  options:\n    use_rslora: 1", 6, "adapter.options.use_rslora: 1 is not bool"),
        ("  method: lora\n  options:\n    r: 1", 6, "adapter.options.r: is set by adapter.r"),
        ("  method: lora\n  options:\n    use_dora: true", 6, "is set by adapter.method (lora or dora)"),
        ("  method: lora\n  options:\n    init_lora_weights: pisa", 6, "'pisa' is not bool"),
        ("  method: lora\n  options:\n    init_lora_weights: eva", 6, "eva is computed from samples before training"),
        ("  method: qlora\n  options:\n    init_lora_weights: pissa", 6,
         "changes the base weights, which qlora stores"),
        ("  method: qlora\n  options:\n    use_dora: true", 6, "DoRA reads the base weights, which qlora packs"),
        ("  method: vera\n  options:\n    lora_ga_config: {}", 6, "vera has no option lora_ga_config"),
        ("  method: lora\n  options:\n    kasa_config: {}", 6, "adds a term to the loss"),
        ("  method: prompt-tuning", 3, "prompt-tuning requires num_virtual_tokens, for example {num_virtual_tokens"),
        ("  dropout: 0.1\n  options: {target_parameters: [experts.down_proj]}", 4,
         "adapter.dropout: is not possible with"),
        ("  target_modules: all-linear\n  options: {layers_to_transform: [1]}", 4, "PEFT requires a list of names"),
        ("  method: adalora", 4, "adapter.method: adalora adds an orthogonality term"),
        ("  method: x-lora", 4, "did you mean xlora?"),
        ("  method: p-tuning\n  path: a\n", 5, "adapter.path: a saved p-tuning adapter holds the virtual tokens"),
    ],
)  # fmt: skip
def test_mistakes_are_reported_with_their_line(adapter: str, line: int, text: str, tmp_path: Path) -> None:
    file = written(tmp_path, adapter)
    with pytest.raises(InputError) as caught:
        load_recipe(file)
    assert any(f"{file}:{line}:" in message and text in message for message in str(caught.value).splitlines())


def test_peft_own_spellings_are_read(tmp_path: Path) -> None:
    content = "  method: LN_TUNING\n"
    assert load_recipe(written(tmp_path, content)).adapter == Adapter(method="ln-tuning")
    content = "  method: lora\n  options: {init_lora_weights: pissa_niter_4, rank_pattern: {q_proj: 8}}\n"
    assert load_recipe(written(tmp_path, content)).adapter is not None


PROMPT = {"method": "prompt-tuning", "options": {"num_virtual_tokens": 4}}
PREFIX = PROMPT | {"method": "prefix-tuning"}


@pytest.mark.parametrize(
    ("method", "strategy", "message"),
    [
        ("dora", "fsdp1", "dora reads the weights of the layer it wraps, which fsdp1 has already sharded"),
        ("vera", "fsdp1", "vera reads its weights outside of a layer, which fsdp1 has already sharded"),
        ("vblora", "fsdp2", "the trained weights of vblora belong to several blocks, and fsdp2 shards each block"),
        ("osf", "fsdp2", "osf projects gradients in hooks on its weights, which fsdp2 replaces by shards"),
    ],
)
def test_what_fsdp_cannot_shard_is_refused(method: str, strategy: str, message: str, tmp_path: Path) -> None:
    values = recipe_dict(tmp_path, adapter={"method": method}, strategy={"name": strategy})
    with pytest.raises(InputError) as caught:
        resolve(Recipe.model_validate(values), "recipe.yaml", device="cpu")
    assert f"recipe.yaml: adapter.method: {message}" in str(caught.value)


@every_case(
    ("adapter", "sections", "message"),
    [
        (PROMPT, {"data": {"packing": True}}, "data.packing: prompt-tuning puts its virtual tokens in front of a row"),
        (PROMPT, {"loss": "fused"}, "loss: fused requires an output for each label"),
        (PROMPT, {"model": {"task": "sequence-classification"}}, "requires model.task: causal-lm"),
        (PREFIX, {"activation_checkpointing": "full"}, "a recomputed block would append its keys and values"),
        ({"method": "hra"}, {"fp8": True, "precision": "bf16"}, "fp8: replaces the calls of linear layers, but hra"),
        ({"method": "hra", "alpha": 3.0}, {}, "adapter.alpha: hra has no such setting"),
        (None, {"model": {"config": LLAMA | {"quantization_config": {"quant_method": "awq", "bits": 4}}}},
         "model.config: its weights are quantised already (awq)"),
        (None, {"model": {"config": LLAMA | {"quantization_config": {"load_in_4bit": True}}}}, "(bitsandbytes, fp4)"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_before_training(
    adapter: dict[str, Any] | None, sections: dict[str, Any], message: str, tmp_path: Path
) -> None:
    values = recipe_dict(tmp_path, adapter=adapter, **sections)
    with pytest.raises(InputError) as caught:
        resolve(Recipe.model_validate(values), "recipe.yaml", device="cpu")
    assert message in str(caught.value)
