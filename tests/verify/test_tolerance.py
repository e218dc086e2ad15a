"""The tolerance is measured: what other correct runs differ by stays below it, with room."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from families import FAMILIES
from toolkit.recipe.resolve import Resolved
from toolkit.reference.fp8 import shaken
from toolkit.verification.cases.prepare import make_case, twin_recipe
from toolkit.verification.compare.noise import DRAW_SAFETY, SAFETY, relative_error
from toolkit.verification.compare.rearrange import all_together, reversed_order, rows_apart
from toolkit.verification.compare.replay import Reference


@pytest.mark.parametrize(
    ("family", "precision"),
    [
        ("llama", "fp32"),
        ("bert", "bf16"),
        pytest.param("qwen3", "bf16", marks=pytest.mark.slow),
        pytest.param("gpt2", "bf16", marks=pytest.mark.slow),
        pytest.param("bert", "fp32", marks=pytest.mark.slow),
    ],
)
def test_twenty_random_orders_and_splits(
    family: str, precision: str, recipe: Callable[..., Resolved], tmp_path: Path
) -> None:
    resolved = recipe("ddp", model=FAMILIES[family], precision=precision)
    reference = Reference(make_case(twin_recipe(resolved, full_size=False), resolved, "precision", tmp_path))
    reference.measure_noise(1, reference.first)
    reference.loop.model.eval()
    window = reference.windows[1]
    reference.loop.backward(1, window)
    plain = dict(reference.loop.gradients)
    draw = random.Random(0)
    worst = dict.fromkeys(plain, 0.0)
    for _ in range(20):
        rows = [micro for micro, _ in rows_apart(window)]
        draw.shuffle(rows)
        parts = []
        while rows:
            size = draw.randint(1, 4)
            parts.append(all_together([(0, row) for row in rows[:size]])[0][0])
            rows = rows[size:]
        reference.loop.backward(1, [(0, part) for part in parts])
        for name, gradient in reference.loop.gradients.items():
            worst[name] = max(worst[name], relative_error(gradient, plain[name]))
    noise = reference.noise
    ratios = {name: worst[name] / max(noise.rearranged[name], noise.eps) for name in worst}
    assert max(worst.values()) > 0
    assert max(ratios.values()) < SAFETY / 2
    assert all(worst[name] < noise.tolerance(name) for name in worst)


def test_twenty_shakes_of_float8_operands(recipe: Callable[..., Resolved], tmp_path: Path) -> None:
    """Where operands differ by a rounding, values fall to other float8 numbers, whatever the rounding was."""
    resolved = recipe("single", model=FAMILIES["llama"], precision="bf16", fp8=True)
    reference = Reference(make_case(twin_recipe(resolved, full_size=False), resolved, "precision", tmp_path))
    reference.measure_noise(1, reference.first)
    reference.loop.model.eval()
    window = reference.windows[1]
    reference.loop.backward(1, window)
    plain = dict(reference.loop.gradients)
    worst = dict.fromkeys(plain, 0.0)
    for seed in range(100, 120):
        with shaken(reference.loop.model, seed):
            reference.loop.backward(1, window)
        for name, gradient in reference.loop.gradients.items():
            worst[name] = max(worst[name], relative_error(gradient, plain[name]))
    noise = reference.noise
    ratios = {name: worst[name] / noise.shaken[name] for name in worst}
    assert min(ratios.values()) > 0.5
    assert max(ratios.values()) < DRAW_SAFETY * 0.8
    # The orders and splits of one window tell little of it: most of their operands are the same to the bit.
    assert statistics.median(noise.rearranged.values()) < statistics.median(noise.shaken.values()) / 2


@pytest.mark.parametrize("short", [1, 3])
def test_the_perturbation_is_one_draw_of_several(short: int, recipe: Callable[..., Resolved], tmp_path: Path) -> None:
    """On an adapter that trains already, where little but the rounding of the stream remains in some tensors."""
    resolved = recipe("ddp", adapter={"r": 4, "dropout": 0.1})
    reference = Reference(make_case(twin_recipe(resolved, full_size=False), resolved, "logic", tmp_path))
    draw = torch.Generator().manual_seed(5)
    trained = {n: w if w.any() else 1e-3 * torch.randn(w.shape, generator=draw) for n, w in reference.first.items()}
    reference.measure_noise(short, trained)
    window = reference.windows[short]
    reference.loop.model.eval()
    plain = reference._run([(micro, [at]) for at, (_, micro) in enumerate(window)], short, 1.0)[1]
    worst = dict.fromkeys(plain, 0.0)
    for seed in range(1, 20):
        with reference._perturbed(seed):
            other = reference._run(reversed_order(window), short, 1.0)[1]
        for name, gradient in plain.items():
            worst[name] = max(worst[name], relative_error(other[name], gradient))
    ratios = {name: worst[name] / reference.noise.perturbed[name] for name in worst}
    assert 1 < max(ratios.values()) < DRAW_SAFETY
    assert all(worst[name] < reference.noise.tolerance(name) for name in worst)
