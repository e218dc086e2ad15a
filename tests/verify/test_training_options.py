"""Options of training are proven under every strategy: frozen parameters, label smoothing, z-loss, noise, averages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from test_equivalent import STRATEGIES, check

from families import FAMILIES
from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.recipe.resolve import Resolved
from toolkit.verification.run import verify

FREEZE = ["embed_tokens", r"layers\.0\."]
ALL: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-3, "run": {"ema": {"decay": 0.99, "every": 2, "start": 1}}}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.nightly
def test_all_options_together(strategy: str, recipe: Callable[..., Resolved], group: WorkerGroup) -> None:
    model = recipe(strategy).recipe.model.config
    options = ALL | {"model": {"config": model, "freeze": FREEZE, "neftune_alpha": 5.0}}
    outcome = verify(recipe(strategy, precision="bf16", **options), group=group, time_limit=300)
    check(outcome)
    claims = {claim.id: claim for claim in outcome.passes[-1].claims}
    assert claims["trainable"].seen == "11"  # of 21: one embedding and the nine tensors of a block are frozen
    assert claims["embedding-noise"].ok
    for one in outcome.passes:
        for name, least in (("update", 5 * 11), ("round-trip", 3 * 11)):
            stage = next(stage for stage in one.stages if stage.name == name)
            averages = [m for m in stage.measures if m.kind == "average"]
            assert len(averages) == least
            if name == "update":
                # A tenth of a change would be seen wherever there is one.
                assert all(m.tolerance < 0.1 for m in averages if m.step >= 1 and m.error < m.tolerance)


@pytest.mark.nightly
def test_all_options_alone_and_fused(recipe: Callable[..., Resolved], lone_group: WorkerGroup) -> None:
    model = recipe("single").recipe.model.config
    options = ALL | {"loss": "fused", "model": {"config": model, "freeze": FREEZE, "neftune_alpha": 5.0}}
    check(verify(recipe("single", precision="bf16", **options), group=lone_group, time_limit=300))


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["zero1", "zero3", "fsdp2"])
def test_terms_of_a_fused_loss(strategy: str, recipe: Callable[..., Resolved], group: WorkerGroup) -> None:
    check(verify(recipe(strategy, precision="bf16", loss="fused", **ALL), group=group, time_limit=300))


@pytest.mark.nightly
def test_noise_on_packed_rows(recipe: Callable[..., Resolved], group: WorkerGroup) -> None:
    model = recipe("fsdp2").recipe.model.config
    options = {"data": {"packing": True}, "model": {"config": model, "neftune_alpha": 5.0}}
    check(verify(recipe("fsdp2", **options), group=group, time_limit=300))


@pytest.mark.nightly
def test_smoothed_classes(recipe: Callable[..., Resolved], group: WorkerGroup) -> None:
    model = FAMILIES["bert"] | {"task": "sequence-classification", "num_labels": 3, "neftune_alpha": 5.0}
    check(verify(recipe("zero2", model=model, label_smoothing=0.2), group=group, time_limit=300))


def test_a_recipe_that_trains_nothing_is_an_error(recipe: Callable[..., Resolved], lone_group: WorkerGroup) -> None:
    model = recipe("single").recipe.model.config
    made = recipe("single", model={"config": model, "freeze": ["proj"]}, adapter={"target_modules": ["q_proj"]})
    with pytest.raises(InputError, match=r"model\.freeze: the patterns match every trainable parameter"):
        verify(made, group=lone_group, time_limit=300)


def test_fsdp1_has_one_flat_parameter_for_a_layer(recipe: Callable[..., Resolved], group: WorkerGroup) -> None:
    model = {"config": FAMILIES["gpt2"]["config"] | {"tie_word_embeddings": False}, "freeze": ["bias$"]}
    with pytest.raises(InputError, match=r"model\.freeze: outside of the blocks fsdp1 shards the weights of a layer"):
        verify(recipe("fsdp1", model=model), group=group, time_limit=300)


@pytest.mark.nightly
def test_layers_of_a_block_may_be_frozen_in_part(recipe: Callable[..., Resolved], group: WorkerGroup) -> None:
    model = {"config": FAMILIES["gpt2"]["config"] | {"tie_word_embeddings": False}, "freeze": [r"h\..*bias$"]}
    check(verify(recipe("fsdp1", model=model), group=group, time_limit=300))
