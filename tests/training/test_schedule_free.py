"""Schedule-free AdamW: its average, what evaluations and exports are at, and what it is refused with."""

from __future__ import annotations

import copy
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from cases import every_case
from jobs import loader_for, resolved_from
from nights import nightly_but
from tiny import recipe_dict
from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.launch.training_args import training_args
from toolkit.optim.groups import make_optimizer
from toolkit.optim.schedule_free import averaged, share_of_last
from toolkit.options.batch_norm.apply import prepare
from toolkit.planning.skeleton import build
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Optimizer
from toolkit.reference.optimizers import formula_for
from toolkit.reference.optimizers.schedule_free import ScheduleFree
from toolkit.strategies import strategies, strategy_of
from toolkit.training import checkpoint
from toolkit.training.export import export
from toolkit.training.loop import Progress, evaluate, train
from toolkit.training.session import Session, open_session
from toolkit.verification.run import verify

STEPS = 4
CONSTANT = {"name": "constant", "warmup_steps": 2}


def recipe(root: Path, strategy: str = "single", **sections: Any) -> Resolved:
    given = {"optimizer": {"name": "schedule-free", "lr": 1.0e-2}, "schedule": CONSTANT, "precision": "bf16"} | sections
    values = recipe_dict(root, strategy={"name": strategy}, **given)
    values["machine"]["processes"] = 1 if strategy == "single" else 2
    return resolved_from(values)


# ---------------------------------------------------------------- the formula


@every_case("warmup", [0, 1, 2, 5, 40])
def test_an_update_has_its_share_of_all_weights(warmup: int) -> None:
    formula = ScheduleFree((0.9, 0.999), 1e-8, warmup)
    for count in range(1, 60):
        assert share_of_last(count, warmup) == pytest.approx(formula.share(count), rel=1e-12)
    assert share_of_last(1000, 0) == pytest.approx(1 / 1000)


def test_steps_with_a_warm_up_are_those_of_the_formula() -> None:
    settings = Optimizer.model_validate({"name": "schedule-free", "lr": 0.02, "weight_decay": 0.1})
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(6, 4, dtype=torch.float64))
    optimizer = make_optimizer({"w": weight}, frozenset({"w"}), frozenset(), settings, fused=False, warmup=3)
    formula = formula_for(settings, (6, 4), False).warmed_up(3)
    expected, state = weight.detach().clone(), None
    x, weights = weight.detach().clone(), []
    for count in range(1, 9):
        lr = 0.02 * min(1.0, (count - 1) / 3)
        weight.grad = torch.randn_like(weight)
        optimizer.param_groups[0]["lr"] = lr
        after = formula.step(expected, weight.grad, state, count=count, lr=lr, weight_decay=0.1)
        optimizer.step()
        expected, state = after.weight, after.moments
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(optimizer.state[weight]["z"], state["z"], rtol=1e-12, atol=1e-14)
        # By definition: the mean of every z, weighed by the square of its rate.
        weights.append(lr**2)
        x = x if not lr else x + weights[-1] / sum(weights) * (state["z"] - x)
        found = averaged(weight.detach(), optimizer.state[weight]["z"], 0.9)
        torch.testing.assert_close(found, x, rtol=1e-11, atol=1e-13)


# ---------------------------------------------------------------- evaluations and exports


def batches(session: Session) -> list[Any]:
    """The same samples on one process and on two."""
    windows = islice(loader_for(session.resolved, session.data_rank), 4 // session.resolved.data_size)
    return [micro for window in windows for micro in window]


def run_job(
    resolved: Resolved, evaluates: bool, folder: str = "", stale: bool = False
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Train; returns each step's loss, the evaluations between them, and the last weights. ``stale``: the engine does
    nothing about what forwards have gathered."""
    session = open_session(resolved)
    if stale:
        session.engine.release = lambda: None  # type: ignore[method-assign]
    losses, found = [], []

    def after(pending: Any) -> None:
        losses.append(float(pending.loss_sum))
        if evaluates:
            found.append(evaluate(session, batches(session)).loss)

    progress = Progress()
    windows = list(islice(loader_for(resolved, session.data_rank), STEPS))
    train(session, windows, STEPS, progress, after)
    if folder:
        checkpoint.save(session, Path(folder), progress)
    return losses, found, {name: session.engine.full_weight(name) for name in session.engine.shapes}


def loss_of_export(resolved: Resolved, folder: Path) -> float:
    """The same evaluation of an exported model, which knows nothing of the optimizer."""
    values = resolved.recipe.model_dump(mode="json")
    values["model"] |= {"path": str(folder), "config": None}
    values["tokenizer"] = {}
    values |= {"optimizer": {}, "schedule": {}}
    session = open_session(resolved_from(values))
    return evaluate(session, batches(session)).loss


@pytest.mark.parametrize(
    "strategy", nightly_but([name for name in strategies() if name != "single"], "zero2", "zero3", "fsdp2")
)
def test_an_evaluation_leaves_training_as_it_was(strategy: str, tiny_root: Path, group: WorkerGroup) -> None:
    resolved = recipe(tiny_root, strategy)
    losses, none, weights = group.run(run_job, resolved, False)[0]
    again, found, same = group.run(run_job, resolved, True)[0]
    assert again == losses, "bit for bit"
    assert all(torch.equal(same[name], weight) for name, weight in weights.items())
    assert len(found) == STEPS
    assert not none


@pytest.mark.parametrize("strategy", nightly_but(["fsdp1", "fsdp2"], "fsdp2"))
def test_weights_that_an_evaluation_gathered_would_train(strategy: str, tiny_root: Path, group: WorkerGroup) -> None:
    """What ``release`` is for: without it the next step computes with some weights of the average."""
    resolved = recipe(tiny_root, strategy)
    assert group.run(run_job, resolved, True, "", True)[0][0] != group.run(run_job, resolved, False)[0][0]


def test_evaluations_and_exports_are_at_the_same_average(tiny_root: Path, tmp_path: Path, group: WorkerGroup) -> None:
    resolved = recipe(tiny_root, precision="fp32")
    _, found, weights = run_job(resolved, True, str(tmp_path / "single/checkpoints"))
    export(tmp_path / "single", tmp_path / "model")
    assert loss_of_export(resolved, tmp_path / "model") == found[-1]
    exported = load_file(tmp_path / "model/model.safetensors")
    moved = [name for name, weight in weights.items() if not torch.equal(exported[name], weight)]
    assert len(moved) == len(weights), "none of them is the weight of training"
    for strategy in ("ddp", "zero2", "zero3", "fsdp1", "fsdp2"):
        sharded = recipe(tiny_root, strategy, precision="fp32")
        _, found, _ = group.run(run_job, sharded, True, str(tmp_path / strategy / "checkpoints"))[0]
        export(tmp_path / strategy, tmp_path / f"model-{strategy}")
        # In float32, with another order of sums over two ranks.
        assert loss_of_export(resolved, tmp_path / f"model-{strategy}") == pytest.approx(found[-1], rel=1e-6), strategy


@pytest.mark.nightly
@pytest.mark.parametrize(("saved", "resumed"), [("fsdp2", "zero3"), ("zero2", "fsdp1"), ("ddp", "fsdp2")])
def test_another_strategy_resumes(
    saved: str, resumed: str, tiny_root: Path, tmp_path: Path, group: WorkerGroup
) -> None:
    first, second, folder = recipe(tiny_root, saved), recipe(tiny_root, resumed), str(tmp_path / f"step-{STEPS:08d}")
    group.run(run_job, first, False, str(tmp_path))
    kept, found = (group.run(load_job, resolved, folder)[0] for resolved in (first, second))
    assert found.keys() == kept.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in kept.items())


def load_job(resolved: Resolved, folder: str) -> dict[str, torch.Tensor]:
    session = open_session(resolved)
    checkpoint.load(session, Path(folder))
    found = {}
    for name in session.engine.shapes:
        state = session.engine.full_state(name)
        assert state is not None
        assert state.step == STEPS
        found |= {name: session.engine.full_weight(name), f"{name}.z": state.moments["z"]}
    return found


# ---------------------------------------------------------------- what it is refused with, and what is said


@every_case(
    ("sections", "message"),
    [
        ({"schedule": {}}, r"schedule\.name: schedule-free averages .* the schedule is cosine; set schedule: "),
        ({"schedule": {"name": "wsd", "decay_steps": 2}}, r"schedule\.name: .* the schedule is wsd"),
        (
            {"schedule": {"name": "constant", "warmup_steps": None, "warmup_ratio": 0.1}},
            r"schedule\.warmup_ratio: .* set schedule\.warmup_steps instead",
        ),
        ({"precision": "bf16-pure"}, r"optimizer\.name: schedule-free averages float32 weights"),
        ({"run": {"ema": {}}}, r"run\.ema: schedule-free already averages"),
        ({"optimizer": {"name": "schedule-free", "betas": [0.0, 0.9]}}, r"optimizer\.betas: .* the default is 0\.9"),
    ],
    ids=str,
)
def test_it_is_refused_with_the_key(sections: dict[str, Any], message: str, tiny_root: Path) -> None:
    with pytest.raises(InputError, match=message):
        recipe(tiny_root, **sections)


def test_running_statistics_of_other_weights_are_refused(tiny_root: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    resolved = recipe(tiny_root)
    prepare(nn.Linear(2, 2), "local", resolved)
    prepare(copy.deepcopy(model), "frozen", resolved)
    with pytest.raises(InputError, match=r"optimizer\.name: schedule-free .* set model\.batch_norm: frozen, or use ad"):
        prepare(model, "local", resolved)


def test_the_recipe_says_what_is_evaluated_and_what_the_trainer_has(tiny_root: Path) -> None:
    resolved = recipe(tiny_root, "ddp")
    decided = {decision.key: decision for decision in resolved.decisions}
    assert "exports are at the average x" in decided["optimizer.schedule-free"].reason
    assert "(k + 1) / warmup_steps" in decided["training_args.lr_scheduler_type"].reason
    made = training_args(resolved)
    expected = {"optim": "schedule_free_adamw", "lr_scheduler_type": "constant", "warmup_steps": 2, "adam_beta1": 0.9}
    assert made.items() >= expected.items()


@every_case("strategy", list(strategies()))
def test_its_state_takes_as_much_as_that_of_adamw(strategy: str, tiny_root: Path) -> None:
    found = []
    for name in ("adamw", "schedule-free"):
        resolved = recipe(tiny_root, strategy, optimizer={"name": name})
        memory = strategy_of(resolved).memory_model()(build(resolved).holdings, resolved)
        found.append(memory.resident["optimizer"] + memory.host.get("optimizer", 0))
    assert found[0] == found[1] > 0


def test_the_fused_loss_is_counted_in_training_alone(tiny_root: Path, group: WorkerGroup) -> None:
    """``verify`` evaluates the average once, without a micro-batch: «losses without logits: 6 of 5»."""
    outcome = verify(recipe(tiny_root, "ddp", loss="fused"), group=group, time_limit=120)
    assert outcome.verdict == "equivalent", (outcome.difference, outcome.failure, outcome.unproven)
