"""Adapters on shared weights are not merged into garbage; a saved adapter's own values are named where they rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs import resolved_from, train_job
from tiny import LLAMA, recipe_dict
from toolkit.errors import InputError
from toolkit.model.adapters import ignored_values
from toolkit.recipe.schema import Adapter
from toolkit.training.export import export

TIED = {"config": LLAMA | {"tie_word_embeddings": True}}
UNTIED = {"config": LLAMA | {"tie_word_embeddings": False}}


def trained(root: Path, tmp_path: Path, adapter: dict[str, Any], model: dict[str, Any]) -> Path:
    recipe = recipe_dict(
        root, strategy={"name": "single"}, machine={"processes": 1}, optimizer={"lr": 0.05},
        schedule={"name": "constant", "warmup_steps": 0}, adapter={"r": 4, **adapter}, model=model,
    )  # fmt: skip
    train_job(resolved_from(recipe), 2, str(tmp_path / "run/checkpoints"), None, 4)
    return tmp_path / "run"


@pytest.mark.parametrize(
    "adapter",
    [
        {"method": "lora", "target_modules": ["q_proj", "embed_tokens"]},
        {"method": "lora", "target_modules": ["q_proj", "lm_head"]},
        {"method": "lora", "target_modules": ["embed_tokens", "lm_head"]},
        {"method": "dora", "target_modules": ["lm_head"]},
        {"method": "lora", "target_modules": ["lm_head"], "options": {"use_rslora": True}},
    ],
)
def test_an_adapter_on_one_of_two_shared_weights_is_not_merged(
    adapter: dict[str, Any], tiny_root: Path, tmp_path: Path
) -> None:
    run = trained(tiny_root, tmp_path, adapter, TIED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("toolkit.training.export._written", lambda job: pytest.fail("refused after the work was done"))
        with pytest.raises(InputError, match="share one weight"):
            export(run, tmp_path / "merged", merged=True)
    assert not (tmp_path / "merged").exists()
    assert export(run, tmp_path / "adapter").kind == "adapter"


@pytest.mark.parametrize(
    ("adapter", "model"),
    [
        ({"method": "lora", "target_modules": ["embed_tokens", "lm_head"]}, UNTIED),
        ({"method": "lora", "target_modules": ["q_proj"]}, TIED),
        ({"method": "lora", "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, TIED),
    ],
)
def test_others_are_merged_to_the_adapter_s_logits(
    adapter: dict[str, Any], model: dict[str, Any], tiny_root: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    from toolkit.launch.identity import saved_recipe
    from toolkit.model.processor import load_processor, pad_token_of
    from toolkit.strategies import resolve
    from toolkit.training.export import alone
    from toolkit.training.export_check import trained_model
    from toolkit.training.finding import newest, whole_manifest

    run = trained(tiny_root, tmp_path, adapter, model)
    export(run, tmp_path / "merged", merged=True)
    folder = newest(run / "checkpoints")
    assert folder is not None
    recipe = saved_recipe(folder, whole_manifest(folder))
    live = trained_model(resolve(alone(recipe), "x", device="cpu"), folder, pad_token_of(load_processor(recipe)))
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        expected = live(input_ids=ids).logits.float()
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)(input_ids=ids).logits
    # Of fp32: sums in another order.
    assert ((found - expected).norm() / expected.norm()).item() < 1e-4


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"r": 16}, "r 4 (recipe: 16)"),
        ({"alpha": 64}, "alpha 8 (recipe: 64.0)"),
        ({"dropout": 0.1}, "dropout 0.0 (recipe: 0.1)"),
        ({"target_modules": "all-linear"}, "target_modules q_proj, v_proj (recipe: all-linear)"),
        ({"target_modules": ["q_proj"]}, "target_modules q_proj, v_proj (recipe: q_proj)"),
        ({"r": 4, "alpha": 8, "dropout": 0.0, "target_modules": ["v_proj", "q_proj"]}, None),
        ({}, None),
    ],
)
def test_values_that_a_saved_adapter_overrides_are_named(
    asked: dict[str, Any], said: str | None, tmp_path: Path
) -> None:
    saved = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": ["v_proj", "q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(saved))
    note = ignored_values(Adapter.model_validate({"method": "lora", "path": str(tmp_path), **asked}))
    if said is None:
        assert note is None
    else:
        assert note is not None
        assert note.endswith(f"ignored: {said}")
