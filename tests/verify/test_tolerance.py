"""The tolerance is measured: what other correct runs differ by stays below it, with room."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from families import FAMILIES
from toolkit.recipe.resolve import Resolved
from toolkit.verify.prepare import make_case, twin_recipe
from toolkit.verify.rearrange import all_together, rows_apart
from toolkit.verify.replay import SAFETY, Reference, relative_error


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
