"""Compiled blocks: what other roundings change, beside what a compiler does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from families import FAMILIES
from nights import nightly_but
from toolkit.model.compiling import compilation, compile_blocks
from toolkit.recipe.resolve import Resolved
from toolkit.reference.roundings import other_roundings
from toolkit.verification.cases.prepare import make_case, twin_recipe
from toolkit.verification.compare.noise import COMPONENTS, Draws, factor, relative_error
from toolkit.verification.compare.replay import Reference

DRAWS = 16


class Gated(nn.Module):
    """A norm, a gated MLP and what goes past it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.gate, self.up, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        hidden: torch.Tensor = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return hidden


def gradients(block: nn.Module, x: torch.Tensor, bf16: bool) -> dict[str, torch.Tensor]:
    block.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        block(x).float().pow(2).sum().backward()
    return {name: p.grad.clone() for name, p in block.named_parameters() if p.grad is not None}


def compiled_gradients(block: nn.Module, x: torch.Tensor, bf16: bool) -> dict[str, torch.Tensor]:
    compiled = copy.deepcopy(block)
    compile_blocks([("", compiled)])
    found = gradients(compiled, x, bf16)
    now = compilation()
    assert now.runs > 0
    assert not now.fell_back
    return found


@pytest.mark.usefixtures("launches")
def test_a_compiled_block_errs_no_more_than_the_draws_say() -> None:
    torch.manual_seed(0)
    block, x = Gated(), torch.randn(3, 7, 32)
    plain = gradients(block, x, bf16=False)
    draws = {name: Draws() for name in plain}
    for seed in range(DRAWS):
        with other_roundings([block], seed):
            found = gradients(block, x, bf16=False)
        for name, right in plain.items():
            draws[name].add(relative_error(found[name], right), (found[name] - right).norm().item())
    compiled = compiled_gradients(block, x, bf16=False)
    errors = {name: relative_error(compiled[name], right) for name, right in plain.items()}
    assert len(errors) == 8
    assert max(errors.values()) > 0, "compiled code computes as the plain block does: the draws have no purpose"
    scales = {name: draws[name].scale(right.norm().item()) for name, right in plain.items()}
    for name, error in errors.items():
        assert error < factor(DRAWS, COMPONENTS, 1e-3) * scales[name], name
    # No tolerance that anything is within.
    assert max(error / scales[name] for name, error in errors.items()) > 1 / 100
    assert max(scales.values()) < 2e-6


@pytest.mark.usefixtures("launches")
def test_a_compiled_block_rounds_to_16_bits_where_the_plain_one_does() -> None:
    torch.manual_seed(0)
    block, x = Gated(), torch.randn(3, 7, 32)
    plain, compiled = gradients(block, x, bf16=True), compiled_gradients(block, x, bf16=True)
    errors = {name: relative_error(compiled[name], right) for name, right in plain.items()}
    assert max(errors.values()) < 1e-5, errors  # a rounding that is left out changes each of them by 1e-3 and more


def test_outside_of_blocks_and_in_products_nothing_is_moved() -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(32, 32).bfloat16(), torch.randn(64, 32).bfloat16()
    with torch.no_grad():
        right, other = linear(x), functional.gelu(x.float())
        with other_roundings([linear], 0):
            assert torch.equal(linear(x), right)
            assert torch.equal(functional.gelu(x.float()), other)


def test_the_forward_is_moved_in_places_of_its_own() -> None:
    torch.manual_seed(0)
    block, x = Gated(), torch.randn(3, 7, 32)
    right = block(x)
    with other_roundings([block], 0):
        found = block(x)
    moved = (found != right).float().mean().item()
    assert moved > 0.1, "hidden states depend on each of these roundings"
    assert 0 < relative_error(found, right) < 1e-6


def test_of_16_bit_values_only_those_are_moved_that_lie_between_two() -> None:
    x = torch.randn(1 << 20).bfloat16()
    right = functional.silu(x)
    block = nn.SiLU()
    with other_roundings([block], 0):
        moved = (block(x) != right).sum().item()
    expected = x.numel() * 2**-16  # eps of float32 divided by that of bfloat16
    assert abs(moved - expected) <= 5 * expected**0.5


def test_no_hook_is_left() -> None:
    block = nn.Linear(4, 4)
    with other_roundings([block], 0):
        block(torch.ones(1, 4))
    assert not block._forward_pre_hooks
    assert not block._forward_hooks


def test_zeros_and_infinities_stay() -> None:
    block, x = nn.Softplus(), torch.tensor([float("inf"), 0.0, 1.0]).repeat(100)
    with other_roundings([block], 0):
        found = block(x)
    assert bool((found[0::3] == torch.inf).all())
    assert len(found[2::3].unique()) == 3, "one spacing up, one down, or as it was"


@pytest.mark.parametrize("family", nightly_but(FAMILIES, "gpt_oss"))
def test_what_a_family_counts_and_chooses_by_is_left_alone(
    family: str, recipe: Callable[..., Resolved], tmp_path: Path
) -> None:
    """A number of rows that an expert takes is a float on its way: a rounding of it would be another model."""
    data = {"format": "prompt-completion"} if FAMILIES[family].get("task") == "seq2seq-lm" else {}
    resolved = recipe("single", model=FAMILIES[family], data=data)
    reference = Reference(make_case(twin_recipe(resolved, full_size=False), resolved, "logic", tmp_path))
    window = reference.windows[1]
    with reference.without_dropout():
        reference.loop.backward(1, window)
        plain = dict(reference.loop.gradients)
        whole = sum(gradient.norm() ** 2 for gradient in plain.values()) ** 0.5
        for seed in range(4):
            with other_roundings(reference.loop.blocks, seed):
                reference.loop.backward(1, window)
            errors = [(reference.loop.gradients[name] - right).norm() / whole for name, right in plain.items()]
            assert 0 < max(errors) < 1e-5, seed
