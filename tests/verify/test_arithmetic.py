"""What a right run may differ by: orders of sums that change nothing but rounding, and the bound of that rounding."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cases import every_case
from families import EVERY_FAMILY, FAMILIES
from tiny import LLAMA
from toolkit.errors import RunFailed
from toolkit.launch.group import WorkerGroup
from toolkit.model import head_loss
from toolkit.recipe.resolve import Resolved
from toolkit.reference.order import NATURAL, Order
from toolkit.threads import torch_threads
from toolkit.verification import passes, run
from toolkit.verification.cases import prepare
from toolkit.verification.cases.prepare import make_case, twin_recipe
from toolkit.verification.compare.arithmetic import loss_bound, order_of, sum_bounds, why_measured
from toolkit.verification.compare.noise import relative_error
from toolkit.verification.compare.replay import Reference

Make = Callable[..., Resolved]


def reference_of(resolved: Resolved, folder: Path, pass_name: str = "logic") -> Reference:
    return Reference(make_case(twin_recipe(resolved, full_size=False), resolved, pass_name, folder))  # type: ignore[arg-type]


def _of_ranks(ranks: int, recipe: Make, **sections: object) -> Resolved:
    return recipe("ddp", machine={"device": "cpu", "processes": ranks}, **sections)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
@pytest.mark.parametrize(
    "order",
    [Order(fused=True), Order(by_module=True), Order(divisor=3), Order(first="micro"), Order(2, "average")],
    ids=str,
)
def test_an_order_changes_nothing_but_rounding(family: str, order: Order, recipe: Make, tmp_path: Path) -> None:
    reference = reference_of(recipe("ddp", model=FAMILIES[family]), tmp_path)
    loop, window = reference.loop, reference.windows[1]
    loop.model.double()
    loop.weights, loop.loss_dtype = dict(loop.trained), torch.float64
    found = []
    for one in (NATURAL, order):
        loop.order = one
        found.append((loop.backward(1, window), {n: g.clone() for n, g in loop.gradients.items()}))
    (losses, gradients), (others, other_gradients) = found
    # The fused loss takes its softmax in float32, llama and qwen3 their norms.
    rounding = 1e-13 if family == "gpt2" and not order.fused else 1e-6
    assert others == pytest.approx(losses, rel=rounding)
    moving = [name for name, gradient in gradients.items() if gradient.norm() > 1e-6]
    assert len(moving) > 10
    assert all(relative_error(other_gradients[name], gradients[name]) < 20 * rounding for name in moving)


def test_the_fused_order_computes_the_head_for_supervised_tokens_alone(recipe: Make, tmp_path: Path) -> None:
    reference = reference_of(recipe("single", loss="fused"), tmp_path)
    assert reference.loop.order.fused
    rows: list[int] = []
    head = reference.loop.model.get_output_embeddings()  # type: ignore[operator]
    head.register_forward_hook(lambda module, args, output: rows.append(output.shape[0]))
    reference.loop.backward(0, reference.windows[0])
    assert rows == [micro.supervised for _, micro in reference.windows[0]]


def test_sums_in_any_order_stay_within_the_bound(recipe: Make, tmp_path: Path) -> None:
    reference = reference_of(_of_ranks(3, recipe, precision="bf16"), tmp_path, "precision")
    loop, window = reference.loop, list(reference.windows[0])
    loop.model.eval()
    loop.backward(0, window)
    right, bounds = dict(loop.gradients), sum_bounds(loop, window)
    draw, worst = random.Random(0), 0.0
    for _ in range(10):
        draw.shuffle(window)
        loop.backward(0, [(0, micro) for _, micro in window])
        ratios = [relative_error(g, right[name]) / bounds[name] for name, g in loop.gradients.items()]
        worst = max(worst, *ratios)
    # A bound, not a guess: rounding errors cancel, so that sums come to a part of it and never beyond.
    assert 0.01 < worst < 1
    assert max(bounds.values()) < 1e-5


def test_a_cancelling_sum_has_a_wider_bound(recipe: Make, tmp_path: Path) -> None:
    reference = reference_of(_of_ranks(3, recipe), tmp_path)
    loop, window = reference.loop, reference.windows[0]
    loop.backward(0, window)
    name = max(loop.gradients, key=lambda one: loop.gradients[one].norm().item())
    before = sum_bounds(loop, window)[name]
    loop.gradients[name] = loop.gradients[name] / 100
    factors = sum_bounds(loop, [window[0]])[name]
    assert sum_bounds(loop, window)[name] - factors == pytest.approx(100 * (before - factors))
    loop.order = replace(loop.order, divisor=2)  # no collective has an order of its own
    assert sum_bounds(loop, window)[name] == factors == pytest.approx(4.8e-7, rel=0.01)


@every_case("size", [1e-4, 1.0, 30.0])
def test_token_losses_summed_otherwise_stay_within_the_bound(size: float) -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(400, 96, generator=draw) * 3
    at = torch.randint(0, 96, (400,), generator=draw)
    logits[torch.arange(400), at] += 12.0 if size < 1 else -size  # nearly sure of the right token; or of another
    torchs = torch.nn.functional.cross_entropy(logits, at, reduction="sum").item()
    quotients = head_loss.linear_cross_entropy(logits, torch.eye(96), None, at).item()
    exact = torch.nn.functional.cross_entropy(logits.double(), at, reduction="sum").item()
    for seen in (torchs, quotients):
        assert abs(seen - exact) / exact < loss_bound(exact, 400) / 2
    assert loss_bound(1000.0, 400) < 3e-6


def test_what_is_free_has_its_reason(recipe: Make, tmp_path: Path) -> None:
    plain = recipe("zero3", precision="bf16")
    windows = reference_of(plain, tmp_path).windows
    assert why_measured(plain, windows, 64) is None
    assert order_of(plain) == Order(2, "micro", by_module=True, fused=False)
    assert order_of(recipe("ddp", strategy={"sync": "every"})).first == "average"
    assert order_of(recipe("ddp", loss="fused")) == Order(2, "rank", by_module=False, fused=True)
    free = {
        "a GPU": replace(plain, device="cuda"),
        "compiled": recipe("ddp", compile=True),
        "another order": replace(plain, traits=replace(plain.traits, same_operations=False)),
    }
    for reason, resolved in free.items():
        assert reason in (why_measured(resolved, windows, 64) or ""), reason
    fused = recipe("ddp", loss="fused")
    assert why_measured(fused, windows, LLAMA["vocab_size"]) is None
    assert "several chunks" in (why_measured(fused, windows, 2**22) or "")
    assert math.isfinite(loss_bound(0.0, 1))


def test_the_plain_loop_has_the_threads_of_a_rank(
    monkeypatch: pytest.MonkeyPatch, recipe: Make, tmp_path: Path
) -> None:
    """torch adds up the bias gradient of a LayerNorm by threads."""
    case = make_case(twin_recipe(recipe("single"), full_size=False), recipe("single"), "logic", tmp_path)
    seen: list[int] = []

    def replay(*_: object) -> None:
        seen.append(torch.get_num_threads())
        raise RuntimeError("far enough")

    monkeypatch.setattr(passes, "replay", replay)
    before = torch.get_num_threads()
    with pytest.raises(RuntimeError, match="far enough"):
        passes.compare(case, passes.Pass("logic"), before + 1)
    assert (seen, torch.get_num_threads()) == ([before + 1], before)


@pytest.mark.parametrize("full_size", [False, True])
def test_what_is_run_before_the_ranks_has_their_threads(
    monkeypatch: pytest.MonkeyPatch, recipe: Make, lone_group: WorkerGroup, full_size: bool
) -> None:
    """Threads of one small product wait for each other where the machine is busy; a model in full size needs them."""
    seen: list[int] = []

    def clipping(_: object) -> None:
        seen.append(torch.get_num_threads())
        raise RunFailed("far enough")

    monkeypatch.setattr(run, "exercise_clipping", clipping)
    with torch_threads(lone_group.threads + 1), pytest.raises(RunFailed, match=r"^far enough"):
        run.verify(recipe("single"), group=lone_group, full_size=full_size)
    assert seen == [lone_group.threads + full_size]


def test_a_loss_scale_that_overflows_is_lowered(recipe: Make, tmp_path: Path) -> None:
    resolved = recipe("single", model=EVERY_FAMILY["exaone4"], adapter={"r": 2, "method": "dora"}, precision="fp16")
    case = make_case(twin_recipe(resolved, full_size=False), resolved, "precision", tmp_path)
    right, scales = prepare.all_finite, []

    def overflows_above_64(reference: Reference, scale: float) -> bool:
        scales.append(scale)
        return right(reference, scale) and scale <= 64

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "all_finite", overflows_above_64)
        assert prepare.avoid_overflow(case).loss_scale == 16  # four times as much must fit
    assert scales == [4096, 1024, 256, 64]
    reference = Reference(case)
    assert right(reference, 1.0)
    assert not right(reference, 2.0**40)
    float32 = make_case(twin_recipe(resolved, full_size=False), resolved, "logic", tmp_path / "logic")
    assert prepare.avoid_overflow(float32) == float32
