"""AdamW's step from sketches: a right one passes, and each part of a wrong one is found in its stage."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from toolkit.strategies.engines.base import OptimizerState
from toolkit.verification.record.trace import RunTrace, StepTrace
from toolkit.verification.scripts import optimizer, sketch
from toolkit.verification.scripts.facts import GroupFacts, Sketches
from toolkit.verification.scripts.sketching import Sketching

BETAS, EPS, DECAY, LR, LIMIT = (0.9, 0.99), 1e-8, 0.1, 1e-2, 0.5
Parameters = dict[str, nn.Parameter]
Defect = Callable[[Parameters, torch.optim.Optimizer, dict[str, torch.Tensor]], None]


def recorded(defect: Defect | None = None, unclipped: str = "", decay: float = DECAY) -> Any:
    """Three steps of torch's AdamW with clipping, as a recording has them. ``defect`` changes what a step has left,
    given the weights before it; ``unclipped``: the tensor that clipping leaves out."""
    draw = torch.Generator().manual_seed(0)
    shapes = {"matrix": (300, 257), "bias": (257,)}
    parameters = {name: nn.Parameter(torch.randn(shape, generator=draw)) for name, shape in shapes.items()}
    taking = torch.optim.AdamW(parameters.values(), lr=LR, betas=BETAS, eps=EPS, weight_decay=decay)
    groups = {name: GroupFacts(list(shapes), list(BETAS), EPS, DECAY, [LR] * 3) for name in shapes}

    def read(into: Sketching) -> Sketches:
        for name, parameter in parameters.items():
            into.weight(lambda name, value: value)(name, parameter.detach())
            if state := taking.state.get(parameter):
                moments = {key: state[key].clone() for key in ("exp_avg", "exp_avg_sq")}
                into.state(name, OptimizerState(int(state["step"]), moments))
        return into.sketches

    run = RunTrace(weights={name: parameter.detach().clone() for name, parameter in parameters.items()})
    begun, sketches = read(Sketching(True, groups)), []
    for number in range(3):
        for parameter in parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=draw)
        kept = Sketching(True, groups)
        for name, parameter in parameters.items():
            kept.gradient(0.0, alone=True)(name, parameter.grad)
        clipped = {name: p for name, p in parameters.items() if name != unclipped}
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters.values() if p.grad is not None])
        torch.nn.utils.clip_grads_with_norm_(list(clipped.values()), LIMIT, norm)
        before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        taking.step()
        if defect is not None:
            with torch.no_grad():
                defect(parameters, taking, before)
        sketches.append(read(kept))
        run.steps.append(StepTrace(number, norm=norm.item()))
    facts = SimpleNamespace(
        adam=True, optimizer="AdamW", groups=[groups["matrix"]], whole_clip=True, limit=LIMIT, by_labels=False
    )
    return SimpleNamespace(facts=facts, trace=SimpleNamespace(run=run), begun=begun, sketches=sketches)


def longer(parameters: Parameters, _: Any, before: dict[str, torch.Tensor]) -> None:
    parameters["matrix"].copy_(before["matrix"] + 1.001 * (parameters["matrix"] - before["matrix"]))


def left_out(parameters: Parameters, _: Any, before: dict[str, torch.Tensor]) -> None:
    parameters["bias"].copy_(before["bias"])


def one_element(parameters: Parameters, _: Any, before: dict[str, torch.Tensor]) -> None:
    parameters["matrix"][7, 7] += 0.01 * (parameters["matrix"] - before["matrix"]).norm()


def shifted(parameters: Parameters, _: Any, before: dict[str, torch.Tensor]) -> None:
    """Rows of another rank's shard."""
    parameters["matrix"].copy_(before["matrix"] + (parameters["matrix"] - before["matrix"]).roll(1, 0))


def of_moment(key: str) -> Defect:
    def change(parameters: Parameters, taking: torch.optim.Optimizer, _: Any) -> None:
        taking.state[parameters["matrix"]][key].mul_(1.001)

    return change


def uncounted(parameters: Parameters, taking: torch.optim.Optimizer, _: Any) -> None:
    taking.state[parameters["bias"]]["step"] += 1


@pytest.fixture(params=["whole", "sketched"])
def _kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "sketched":
        monkeypatch.setattr(sketch, "EXACT", 300)


@pytest.mark.usefixtures("_kept")
def test_a_right_step_passes() -> None:
    stages, notes = optimizer.stages(recorded())
    assert [stage.name for stage in stages] == ["clip", "update", "optimizer-state"]
    assert [(stage.name, stage.first_wrong) for stage in stages if not stage.ok] == []
    assert notes == []
    assert stages[0].summary == "clipped in steps 1, 2, 3"
    assert all(stage.detection_limit is not None and stage.detection_limit < 1e-4 for stage in stages)


@pytest.mark.usefixtures("_kept")
def test_each_part_of_a_wrong_step_is_found_where_it_is(subtests: pytest.Subtests) -> None:
    wrong: dict[str, tuple[Any, str]] = {
        "an update too long": (recorded(longer), "update"),
        "a weight left out": (recorded(left_out), "update"),
        "one element": (recorded(one_element), "update"),
        "rows in another order": (recorded(shifted), "update"),
        "no decay": (recorded(decay=0.0), "update"),
        "the first moment": (recorded(of_moment("exp_avg")), "clip"),
        "the second moment": (recorded(of_moment("exp_avg_sq")), "optimizer-state"),
        "the count": (recorded(uncounted), "optimizer-state"),
        "a tensor that is not clipped": (recorded(unclipped="bias"), "clip"),
    }
    for name, (unit, where) in wrong.items():
        with subtests.test(name):
            stages, _ = optimizer.stages(unit)
            assert where in [stage.name for stage in stages if not stage.ok]


def test_a_norm_that_was_summed_in_another_order_is_no_difference() -> None:
    """On a CPU torch adds up the squares of a large tensor one after another: what it is off by is measured."""
    unit = recorded()
    for step, sketches in zip(unit.trace.run.steps, unit.sketches, strict=True):
        sketches.norms = {name: (exact, exact * (1 + 3e-5)) for name, (exact, _) in sketches.norms.items()}
        step.norm *= 1 + 3e-5
    stages, _ = optimizer.stages(unit)
    assert stages[0].ok
    unit.trace.run.steps[0].norm *= 1 + 3e-4
    stages, _ = optimizer.stages(unit)
    assert not stages[0].ok
