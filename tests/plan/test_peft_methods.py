"""`plan` for other methods than LoRA: what trains, frozen projections, and memory against real training."""

from __future__ import annotations

from typing import Any

import pytest

from plan.cells import LLAMA, Cell
from plan.truth import measured, resolved_from
from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.planning.predict import Planner
from toolkit.planning.skeleton import build
from toolkit.recipe.adapter_methods import METHODS
from toolkit.recipe.schema import Adapter
from toolkit.training.preparation import prepare_model
from toolkit.verification.cases.twin import twin_adapter

EIGHT = LLAMA | {"num_hidden_layers": 8}
SOME_LAYERS: dict[str, Any] = {
    "method": "lora",
    "r": 4,
    "options": {"layers_to_transform": [2, 5, 6], "rank_pattern": {"q_proj": 2}},
}
SOME_LAYERS |= {"target_modules": ["q_proj", "v_proj"]}
REGEX = {"method": "lora", "r": 4, "target_modules": r".*layers\.(1|7)\.self_attn\.[qv]_proj"}


UNPLANNED = {"frod", "loha", "lokr", "shira", "vblora", "waveft"}
"""Created from, or computed by, the values of weights."""


def sections(adapter: dict[str, Any], strategy: str = "single", length: int = 32) -> dict[str, Any]:
    return Cell("llama", False, strategy, "none", length).recipe() | {"adapter": adapter}


def adapter_of(name: str) -> dict[str, Any]:
    asked = Adapter.model_validate({"method": name, "options": dict(METHODS[name].required)})
    return twin_adapter(asked.model_dump(), LLAMA)


@pytest.mark.parametrize(
    "adapter",
    [
        *(adapter_of(name) for name in ("vera", "ia3", "prompt-tuning", "prefix-tuning", "unilora", "ln-tuning")),
        SOME_LAYERS,
        REGEX,
        *({"method": "lora", "r": 4, "options": {"init_lora_weights": start}} for start in ("pissa", "olora")),
    ],
    ids=lambda adapter: adapter["method"] + ("" if "layers" not in str(adapter) else " by layer"),
)
def test_what_trains_and_what_is_projected_is_counted_as_in_the_whole_model(adapter: dict[str, Any]) -> None:
    # Of a random model under bf16, buffers are cast when it is created; a checkpoint's are not.
    recipe = sections(adapter) | {"model": {"config": EIGHT}, "precision": "fp32"}
    resolved = resolved_from(recipe)
    holdings = build(resolved).holdings
    model = prepare_model(resolved, 0).model
    assert holdings.elements(True) == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert holdings.elements() == sum(p.numel() for p in model.parameters())
    assert holdings.buffers == sum(b.numel() * b.element_size() for b in model.buffers())


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.why_not is None])
def test_every_method_is_planned(name: str) -> None:
    """Or refused, where an adapter depends on the values of weights."""
    resolved = resolved_from(sections(adapter_of(name)))
    if name in UNPLANNED:
        with pytest.raises(InputError, match="toolkit bench RECIPE"):
            Planner.of(resolved, 32).memory(resolved)
        return
    planner = Planner.of(resolved, 32)
    assert planner.memory(resolved).peak > 0
    model = prepare_model(resolved, 0).model
    assert planner.skeleton.holdings.elements(True) == sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("vera", "single"),
        pytest.param("ia3", "zero2", marks=pytest.mark.nightly),
        pytest.param("prompt-tuning", "fsdp2", marks=pytest.mark.nightly),
        pytest.param("hra", "single", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.usefixtures("launches")
def test_memory_is_that_of_real_training(name: str, strategy: str) -> None:
    recipe = sections(adapter_of(name), strategy, 128)
    with WorkerGroup(1 if strategy == "single" else 2) as group:
        real = max(group.run(measured, recipe, 128))
    resolved = resolved_from(recipe)
    said = Planner.of(resolved, 128).memory(resolved).peak
    assert abs(said / real - 1) < 0.05, f"{name}: predicted {said:,}, measured {real:,}"


def test_a_start_that_needs_values_is_refused_in_words() -> None:
    adapter = {"method": "lora", "r": 4, "options": {"init_lora_weights": "mica"}}
    with pytest.raises(InputError, match="lora is created from the values of weights, which a plan does not have"):
        build(resolved_from(sections(adapter)))
