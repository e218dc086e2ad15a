"""AdamW with stochastic rounding: the step, what it is for, every strategy, resuming, proof, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cases import every_case
from jobs import Run, resolved_from, train_job
from nights import nightly_but
from tiny import recipe_dict
from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.optim.groups import make_optimizer
from toolkit.optim.placed import Place
from toolkit.optim.stochastic import StochasticAdamW
from toolkit.recipe.schema import Optimizer
from toolkit.reference.optimizers import formula_for
from toolkit.reference.optimizers.stochastic import random_halves
from toolkit.training.finding import newest
from toolkit.verification.faults import fault_class
from toolkit.verification.matrix import what_caught
from toolkit.verification.run import verify

STOCHASTIC = {"rounding": "stochastic"}


def slower(*names: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.nightly) for name in names]


def recipe(root: Path, strategy: Any, **sections: Any) -> dict[str, Any]:
    own = {
        "strategy": {"name": strategy} if isinstance(strategy, str) else strategy,
        "optimizer": STOCHASTIC | {"weight_decay": 0.1, "lr": 1e-3},
        "precision": "bf16-pure",
        "batch": {"accumulation": 3},
    }
    return recipe_dict(root, **(own | sections))


def made(weight: torch.Tensor, places: list[Place] | None = None, **keys: Any) -> StochasticAdamW:
    settings = Optimizer.model_validate(STOCHASTIC | {"weight_decay": 0.1, "lr": 1e-3} | keys)
    optimizer = make_optimizer({"w": torch.nn.Parameter(weight)}, frozenset({"w"}), frozenset(), settings, fused=True)
    assert isinstance(optimizer, StochasticAdamW)
    optimizer.locate(parameter(optimizer), places or [Place("w", 0, 0, weight.numel())])
    return optimizer


def parameter(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    found: torch.Tensor = optimizer.param_groups[0]["params"][0]
    return found


def stepped(optimizer: StochasticAdamW, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """The weight and its moments after these steps."""
    weight = parameter(optimizer)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    return [weight.detach(), *(optimizer.state[weight][key] for key in ("exp_avg", "exp_avg_sq"))]


def drawn(size: int, steps: int = 4) -> tuple[torch.Tensor, list[torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    gradients = [torch.randn(size, generator=draw).bfloat16() for _ in range(steps)]
    return (0.02 * torch.randn(size, generator=draw)).bfloat16(), gradients


def test_the_random_numbers_are_uniform_and_independent() -> None:
    size = 2**18
    three = random_halves("model.layers.0.mlp.up_proj.weight", 7, size)
    others = random_halves("model.layers.0.mlp.up_proj.weight", 8, size)
    for half, other in zip(three, others, strict=True):
        counts = torch.bincount(torch.from_numpy(half) // 256, minlength=256).double()
        # Pearson's statistic of 256 cells: mean 255, deviation 22.6; seven deviations.
        assert ((counts - size / 256) ** 2 / (size / 256)).sum().item() < 255 + 7 * 22.6
        for same in (half[1:], other[:-1], other[1:]):
            pair = torch.from_numpy(half[:-1] / 65536), torch.from_numpy(same / 65536)
            # A correlation of n independent pairs deviates by 1 / sqrt(n).
            assert abs(torch.corrcoef(torch.stack(pair))[0, 1].item()) < 7 / size**0.5
    first, second, third = (torch.from_numpy(half / 65536) for half in three)
    assert torch.corrcoef(torch.stack([first, second, third])).triu(1).abs().max().item() < 7 / size**0.5


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.usefixtures("launches")
def test_the_step_is_the_formulas_to_the_bit_but_where_float32_decides(compiled: bool) -> None:
    size = 70_001  # more than two chunks, and no multiple of a vector
    weight, gradients = drawn(size)
    optimizer = made(weight.clone())
    if not compiled:
        optimizer.fell_back = "as if the compiler had failed"
    formula = formula_for(Optimizer.model_validate(STOCHASTIC), (size,), False).named("w")
    state = None
    for count, gradient in enumerate(gradients, start=1):
        before = parameter(optimizer).detach().clone()
        found = stepped(optimizer, [gradient])
        right = formula.step(before, gradient, state, count=count, lr=1e-3, weight_decay=0.1)
        assert right.slack is not None
        off = (found[0].double() - right.weight).abs()
        assert (off <= right.slack).all()
        # What float32 leaves open is a few of 65536 ways to round; nearest would differ in a quarter of the elements.
        assert (right.slack > 0).double().mean().item() < 0.01
        assert (off > 0).double().mean().item() < 0.001
        for moment, key in zip(found[1:], formula.keys, strict=True):
            assert (moment.double() != right.moments[key]).double().mean().item() < 0.001, key
        state = dict(zip(formula.keys, (one.clone() for one in found[1:]), strict=True))
    calls = {"compiled": 0, "uncompiled": 0, "compiled" if compiled else "uncompiled": len(gradients)}
    assert optimizer.calls == calls, optimizer.fell_back


@pytest.mark.usefixtures("launches")
def test_shards_take_the_step_of_the_whole() -> None:
    weight, gradients = drawn(5000)
    whole = stepped(made(weight.clone()), gradients)
    for first, last in ((0, 1), (1, 2049), (2049, 5000)):
        part = made(weight[first:last].clone(), [Place("w", first, 0, last - first)])
        for one, all_of_it in zip(stepped(part, [g[first:last] for g in gradients]), whole, strict=True):
            assert torch.equal(one, all_of_it[first:last])
    # A partition of two weights with padding behind them.
    flat = made(weight.clone(), [Place("w", 300, 0, 700), Place("v", 0, 700, 4000)])
    found = stepped(flat, gradients)
    assert torch.equal(found[0][4700:], weight[4700:])
    alone = made(weight[700:4700].clone(), [Place("v", 0, 0, 4000)])
    assert torch.equal(found[0][700:4700], stepped(alone, [g[700:4700] for g in gradients])[0])
    assert not torch.equal(found[0][700:4700], whole[0][700:4700])


@pytest.mark.usefixtures("launches")
def test_weights_of_any_size_at_any_offset_run_the_compiled_kernel() -> None:
    """Sizes that torch compiles apart (1) or vectors do not divide; a ZeRO partition has them side by side."""
    sizes = [1, 2, 3, 7, 16, 31, 65, 1, 1000, 129]
    starts = [sum(sizes[:at]) for at in range(len(sizes))]
    weight, gradients = drawn(sum(sizes))
    places = [Place(f"w{at}", 0, start, size) for at, (start, size) in enumerate(zip(starts, sizes, strict=True))]
    optimizer = made(weight.clone(), places)
    found = stepped(optimizer, gradients)
    assert optimizer.fell_back is None
    assert optimizer.calls == {"compiled": len(sizes) * len(gradients), "uncompiled": 0}
    other = made(weight.clone(), places)
    other.fell_back = "as if the compiler had failed"
    assert all(torch.equal(one, same) for one, same in zip(found, stepped(other, gradients), strict=True))


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(AssertionError, match=r"a tensor of torch\.float32"):
        made(torch.ones(3))


def test_a_tensor_without_a_place_is_refused() -> None:
    weight, gradients = drawn(8)
    settings = Optimizer.model_validate(STOCHASTIC)
    optimizer = make_optimizer({"w": torch.nn.Parameter(weight)}, frozenset(), frozenset(), settings, fused=True)
    with pytest.raises(AssertionError, match="place in the weights is unknown"):
        stepped(optimizer, gradients)  # type: ignore[arg-type]


@pytest.mark.usefixtures("launches")
def test_small_updates_and_decays_are_not_lost() -> None:
    """Weights of 1 move by 1e-4 a step, where bfloat16 numbers are 2^-8 apart below; second moments of 1 have
    gradients of 0.5, so that they tend to 0.25."""
    size, steps = 4096, 200
    gradients = [torch.full((size,), 0.5).bfloat16()] * steps
    keys = {"lr": 1e-4, "weight_decay": 0.0, "betas": [0.9, 0.99]}

    def course(rounding: str) -> tuple[float, float]:
        settings = Optimizer.model_validate({"rounding": rounding} | keys)
        weight = torch.nn.Parameter(torch.ones(size).bfloat16())
        optimizer = make_optimizer({"w": weight}, frozenset(), frozenset(), settings, fused=True)
        if isinstance(optimizer, StochasticAdamW):
            optimizer.locate(weight, [Place("w", 0, 0, size)])
        optimizer.state[weight] = {"step": torch.tensor(1e6), "exp_avg": torch.full_like(weight, 0.5),
                                   "exp_avg_sq": torch.ones_like(weight)}  # fmt: skip
        for gradient in gradients:
            weight.grad = gradient
            optimizer.step()
        return weight.double().mean().item(), optimizer.state[weight]["exp_avg_sq"].double().mean().item()

    moment = 0.25 + 0.75 * 0.99**steps
    moved = sum(1e-4 * 0.5 / (0.25 + 0.75 * 0.99**step) ** 0.5 for step in range(1, steps + 1))
    weight, second = course("stochastic")
    # Seven deviations of a mean of 4096 whose last digits (2^-8 and 2^-9, a step's variance below a quarter) are drawn.
    assert abs(weight - (1 - moved)) < 7 * 2**-8 * (steps / 4) ** 0.5 / size**0.5
    assert abs(second - moment) < 7 * 2**-8 * (steps / 4) ** 0.5 / size**0.5
    assert course("nearest")[0] == 1.0  # nothing moved


@pytest.mark.parametrize("strategy", nightly_but(["ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2"], "zero3"))
def test_every_strategy_takes_the_step_of_the_definition(strategy: str, tiny_root: Path, group: WorkerGroup) -> None:
    outcome = verify(resolved_from(recipe(tiny_root, strategy)), group=group, time_limit=200)
    assert outcome.verdict == "equivalent", (outcome.difference, outcome.failure)


LORA = {"method": "lora", "r": 4, "alpha": 8, "dropout": 0.0, "target_modules": "all-linear"}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("strategy", "sections"),
    [
        ("ddp", {"compile": True}),
        ("fsdp1", {"adapter": LORA}),
        ("zero3", {"adapter": LORA}),
    ],
    ids=["compiled blocks", "lora fsdp1", "lora zero3"],
)
def test_beside_other_options(strategy: Any, sections: dict[str, Any], tiny_root: Path, group: WorkerGroup) -> None:
    outcome = verify(resolved_from(recipe(tiny_root, strategy, **sections)), group=group, time_limit=300)
    assert outcome.verdict == "equivalent", (outcome.difference, outcome.failure, outcome.unproven)


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2", "zero3"])
def test_ranks_that_hold_copies_take_the_same_step(strategy: str, tiny_root: Path, four: WorkerGroup) -> None:
    values = recipe(tiny_root, {"name": strategy, "mesh": {"replicate": 2, "shard": 2}}, machine={"processes": 4})
    outcome = verify(resolved_from(values), group=four, time_limit=300)
    assert outcome.verdict == "equivalent", (outcome.difference, outcome.failure, outcome.unproven)


@pytest.mark.parametrize(
    ("fault", "strategy"),
    [
        pytest.param("rounded-to-nearest", "ddp", marks=pytest.mark.nightly),
        ("bits-of-one-step", "fsdp2"),
        ("bits-by-rank", "fsdp1"),
        pytest.param("rounded-to-nearest", "zero3", marks=pytest.mark.nightly),
        *(
            pytest.param("bits-by-rank", name, marks=pytest.mark.nightly)
            for name in ("zero1", "zero2", "zero3", "fsdp2")
        ),
    ],
)
def test_a_wrong_rounding_is_found(fault: str, strategy: str, tiny_root: Path, group: WorkerGroup) -> None:
    outcome = verify(resolved_from(recipe(tiny_root, strategy)), group=group, fault=fault, time_limit=200)
    assert what_caught(outcome)[0] == "update", what_caught(outcome)
    assert outcome.diagnosis is not None
    assert outcome.diagnosis.id in fault_class(fault).diagnoses, outcome.diagnosis


@pytest.mark.parametrize("strategy", nightly_but(["zero2", "zero3", "fsdp1", "fsdp2"], "zero3"))
def test_a_resumed_run_continues_to_the_bit(strategy: str, tiny_root: Path, tmp_path: Path, group: WorkerGroup) -> None:
    resolved = resolved_from(recipe(tiny_root, strategy, run={"max_steps": 6}))
    straight: Run = group.run(train_job, resolved, 6, None, None, 6)[0]
    group.run(train_job, resolved, 3, str(tmp_path), None, 6)
    run: Run = group.run(train_job, resolved, 3, None, str(newest(tmp_path)), 6)[0]
    assert run.losses == straight.losses[3:]
    assert all(torch.equal(run.weights[name], weight) for name, weight in straight.weights.items())
    assert all(torch.equal(run.moments[name], moment) for name, moment in straight.moments.items())


@every_case(
    ("sections", "message"),
    [
        ({"precision": "bf16"}, "optimizer.rounding: stochastic rounds weights that are kept in bfloat16"),
        ({"optimizer": {"name": "lion", "rounding": "stochastic"}}, "lion does not have this key"),
        ({"optimizer": {"kernel": "foreach", "rounding": "stochastic"}}, "has its own kernel; remove optimizer.kernel"),
        ({"strategy": {"name": "fsdp2", "mesh": {"tensor": 2}}}, "has not been verified beside mesh.tensor"),
    ],
)
def test_it_is_refused_where_it_means_nothing(sections: dict[str, Any], message: str, tiny_root: Path) -> None:
    with pytest.raises((InputError, ValueError), match=message):
        resolved_from(recipe(tiny_root, **({"strategy": "fsdp2"} | sections)))


@pytest.mark.usefixtures("launches")
def test_without_a_compiler_the_step_is_the_same_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo import exc

    from toolkit.optim import stochastic

    weight, gradients = drawn(5000)
    right = stepped(made(weight.clone()), gradients)

    def missing() -> Any:
        raise exc.BackendCompilerFailed(lambda: None, RuntimeError("no compiler"), None)

    monkeypatch.setattr(stochastic, "_kernel", missing)
    optimizer = made(weight.clone())
    found = stepped(optimizer, gradients)
    assert all(torch.equal(one, other) for one, other in zip(found, right, strict=True))
    assert optimizer.calls == {"compiled": 0, "uncompiled": len(gradients)}
    assert "no compiler" in str(optimizer.fell_back)
