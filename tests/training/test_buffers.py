"""Buffers of a model from a config have the dtypes of one that is loaded from a folder."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cases import every_case
from families import EVERY_FAMILY, FAMILIES, HYBRIDS
from tiny import LLAMA, recipe_dict
from toolkit.model.load import _buffer_dtypes, load_base
from toolkit.planning.predict import Planner
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve

# A table that stays float32, buffers that products are made with, one that is multiplied by element, and one that the
# class lists to stay float32.
MODELS = {
    name: {**FAMILIES, **EVERY_FAMILY, **HYBRIDS}[name] for name in ("llama", "minimax", "falcon_h1", "deepseek_v3")
}
IN_16_BITS: dict[str, dict[str, Any]] = {
    "all weights": {"precision": "bf16-pure"},
    "frozen base": {"precision": "bf16", "adapter": {"method": "lora", "r": 4, "target_modules": "all-linear"}},
}


def resolved(model: dict[str, Any], **sections: Any) -> Resolved:
    values = recipe_dict(Path("nowhere"), strategy={"name": "single"}, machine={"processes": 1}, **sections)
    return resolve(Recipe.model_validate(values | {"model": model}), "recipe", device="cpu")


@every_case(("name", "sections", "by_part"), product(MODELS, IN_16_BITS.values(), [False, True]))
def test_a_config_gives_the_buffers_of_a_folder(
    name: str, sections: dict[str, Any], by_part: bool, tmp_path: Path
) -> None:
    """Rounded rotary frequencies turn positions in the thousands by other angles than the host of an export does."""

    made = load_base(resolved(MODELS[name], **sections), by_part=by_part)
    load_base(resolved(MODELS[name])).save_pretrained(tmp_path)
    others = {key: value for key, value in MODELS[name].items() if key != "config"}
    loaded = load_base(resolved(others | {"path": str(tmp_path)}, **sections), by_part=by_part)
    expected = dict(loaded.named_buffers())
    assert {key: buffer.dtype for key, buffer in made.named_buffers()} == {k: b.dtype for k, b in expected.items()}
    tables = {key: buffer for key, buffer in made.named_buffers() if key.endswith("inv_freq")}
    assert tables
    for key, table in tables.items():
        assert table.dtype == torch.float32
        assert torch.equal(table, expected[key])


def test_a_model_whose_code_needs_values_is_built_with_them_and_draws_nothing() -> None:
    """What is drawn next, an adapter's weights, is the same in every precision."""

    def build() -> Any:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA), dtype=torch.bfloat16)
        met.append(model.device.type)
        model.model.norm.weight.sum().item()
        return model

    met: list[str] = []
    before = torch.random.get_rng_state()
    dtypes = _buffer_dtypes(build, torch.bfloat16)
    assert met == ["meta", "cpu"]
    assert dtypes["model.rotary_emb.inv_freq"] == torch.float32
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_plan_traces_products_with_buffers() -> None:
    """MiniMax multiplies the states of its linear attention with buffers, which are in 16 bits where weights are."""
    recipe = resolved(MODELS["minimax"], precision="bf16-pure")
    assert Planner.of(recipe, 16).memory(recipe) is not None
