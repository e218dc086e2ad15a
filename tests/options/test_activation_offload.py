"""Activations in host memory: what goes there and comes back, that it is proven, and where it is refused."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cases import every_case
from jobs import resolved_from
from tiny import make_llama, recipe_dict
from toolkit.errors import InputError
from toolkit.launch.identity import identity
from toolkit.model.checkpointing import checkpoint_blocks, recomputed_calls, stores_of
from toolkit.options.activation_offload.apply import HostStore
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve
from toolkit.training.export import alone
from toolkit.training.preparation import prepare_model
from toolkit.verification.compare.engagement import _options
from toolkit.verification.record.trace import RankTrace
from training.test_checkpointing import gradients_of


def resolved_on_gpu(root: Path) -> Resolved:
    values = recipe_dict(root, activation_checkpointing="full", activation_offload=True, machine={"device": "cuda"})
    return resolve(Recipe.model_validate(values), "recipe", device="cuda")


class _Copies:
    """Stands in for the GPU's mover: «there» and the host are both this memory, every copy is counted."""

    def __init__(self, device: torch.device) -> None:
        self.log: list[str] = []

    def out(self, tensor: torch.Tensor) -> torch.Tensor:
        self.log.append("out")
        return tensor.clone()

    def back(self, host: torch.Tensor) -> torch.Tensor:
        self.log.append("back")
        return host.clone()

    def settle(self) -> None:
        self.log.append("settle")


def test_blocks_inputs_go_to_the_host_and_come_back_one_ahead() -> None:
    plain, blocks = make_llama()
    checkpoint_blocks(blocks, "full")
    right = gradients_of(plain)
    model, blocks = make_llama()
    store = HostStore(_Copies)
    checkpoint_blocks(blocks, "full", store)
    assert all(a.equal(b) for a, b in zip(gradients_of(model), right, strict=True))
    assert stores_of(blocks) == [store]
    # Two blocks: the second's input is fetched, and the first's while the second is at its backward.
    assert store._mover.log == ["out", "out", "back", "settle", "back", "settle"]
    assert (store.moved, store.returned) == (2, 2)
    assert store.bytes_out == 2 * 2 * 9 * 32 * 4
    assert recomputed_calls(blocks) == [2, 2]
    gc.collect()
    assert not store.waiting


def test_a_forward_without_a_backward_leaves_nothing_in_the_host() -> None:
    model, blocks = make_llama()
    store = HostStore(_Copies)
    checkpoint_blocks(blocks, "full", store)
    ids = torch.arange(18).reshape(2, 9)
    loss = model(input_ids=ids).logits.sum()
    assert len(store.waiting) == 2
    del loss
    gc.collect()
    assert not store.waiting


@every_case(
    ("counts", "reached", "ok"),
    [
        ([(4, 4, 512)], [True, True], True),
        ([], [True, True], False),
        ([(4, 3, 512)], [True, True], False),  # one did not come back
        ([(3, 3, 512)], [True, True], False),  # one stayed
        # A first block that is frozen, as what is before it, has no backward to come back for.
        ([(4, 2, 512)], [False, True], True),
        ([(4, 1, 512)], [False, True], False),
    ],
)
def test_offloaded_activations_are_proven(
    tiny_root: Path, counts: list[tuple[int, int, int]], reached: list[bool], ok: bool
) -> None:
    trace = RankTrace(0, forwards=2, recomputed=[4, 4], offloaded=counts)
    reference: Any = SimpleNamespace(backward_reaches=lambda: reached)
    claims = _options([trace], resolved_on_gpu(tiny_root), reference)
    assert [(claim.id, claim.ok) for claim in claims] == [("offloaded", ok)]


@every_case(
    ("sections", "message"),
    [
        ({"activation_checkpointing": "full"}, "activation_offload: moves memory from a GPU to the host"),
        ({"activation_checkpointing": "selective"}, "requires activation_checkpointing: full .it is selective."),
    ],
)
def test_offload_is_refused_where_it_cannot_be(tiny_root: Path, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolved_from(recipe_dict(tiny_root, activation_offload=True, **sections))


def test_it_may_change_on_resume_and_is_left_out_of_an_export(tiny_root: Path) -> None:
    recipe = resolved_on_gpu(tiny_root).recipe
    assert "activation_offload" not in identity(recipe.model_dump(mode="json"))
    assert not alone(recipe).activation_offload


def test_a_run_with_it_has_one_store_for_all_blocks(tiny_root: Path) -> None:
    resolved = resolved_from(recipe_dict(tiny_root, activation_checkpointing="full"))
    asked = replace(resolved, recipe=resolved.recipe.model_copy(update={"activation_offload": True}))
    assert [len(stores_of(prepare_model(one).blocks)) for one in (resolved, asked)] == [0, 1]
