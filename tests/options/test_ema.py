"""The moving average of the weights: its definition, checkpoints under every strategy, exports, memory."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import toolkit
from cases import every_case
from jobs import loader_for, resolved_from
from tiny import recipe_dict
from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.planning.skeleton import build
from toolkit.recipe.resolve import Resolved
from toolkit.strategies import strategy_of
from toolkit.training import checkpoint
from toolkit.training.export import export
from toolkit.training.loop import Progress, train
from toolkit.training.session import Session, open_session

EMA = {"decay": 0.9, "every": 2, "start": 1}
Tensors = dict[str, torch.Tensor]


def averages(session: Session) -> Tensors:
    with session.shadows["ema"].swapped():
        return {name: session.engine.full_weight(name) for name in session.engine.shapes}


def weights(session: Session) -> Tensors:
    return {name: session.engine.full_weight(name) for name in session.engine.shapes}


def recipe(root: Path, strategy: str, **sections: Any) -> dict[str, Any]:
    processes = 1 if strategy == "single" else 2
    sections = {"run": {"ema": EMA}, "precision": "bf16", **sections}
    return recipe_dict(root, strategy={"name": strategy}, machine={"processes": processes}, **sections)


def steps_job(resolved: Resolved, steps: int, folder: str) -> tuple[Tensors, list[Tensors], Tensors]:
    """Train and save: the first weights, those after each step, and the last averages."""
    session = open_session(resolved)
    first, seen = weights(session), []
    progress = Progress()
    windows = list(islice(loader_for(resolved, session.accelerator.process_index), steps))
    train(session, windows, steps, progress, lambda pending: seen.append(weights(session)))
    found = averages(session)
    checkpoint.save(session, Path(folder), progress)
    assert all(torch.equal(seen[-1][name], weight) for name, weight in weights(session).items()), "swapped back"
    return first, seen, found


def load_job(resolved: Resolved, folder: str) -> tuple[Tensors, Tensors]:
    session = open_session(resolved)
    checkpoint.load(session, Path(folder))
    return weights(session), averages(session)


def check_definition(first: Tensors, seen: list[Tensors], found: Tensors) -> None:
    for name, average in found.items():
        right = seen[0][name].double()  # start: the weights after update 1
        right = 0.9 * right + 0.1 * seen[2][name].double()  # every 2: after updates 3 and 5
        right = 0.9 * right + 0.1 * seen[4][name].double()
        # Two sums of float32 numbers, each rounded three times.
        assert (average - right).norm() < 1e-6 * right.norm(), name
        moved = (seen[4][name] - first[name]).norm()
        if moved > 1e-4 * right.norm():
            assert (average - seen[4][name]).norm() > 0.1 * moved, "it lags behind"


def test_every_strategy_resumes_the_average_of_any_other(tiny_root: Path, tmp_path: Path, group: WorkerGroup) -> None:
    made = group.run(steps_job, resolved_from(recipe(tiny_root, "zero2")), 5, str(tmp_path))[0]
    check_definition(*made)
    for strategy in ("ddp", "zero3", "fsdp1", "fsdp2"):
        loaded = group.run(load_job, resolved_from(recipe(tiny_root, strategy)), str(tmp_path / "step-00000005"))
        for found in loaded:
            assert all(torch.equal(found[0][name], weight) for name, weight in made[1][-1].items()), strategy
            assert all(torch.equal(found[1][name], average) for name, average in made[2].items()), strategy


def test_an_export_may_have_the_averages(tiny_root: Path, tmp_path: Path) -> None:
    run = tmp_path / "run/checkpoints"
    made = steps_job(resolved_from(recipe(tiny_root, "single")), 5, str(run))
    check_definition(*made)
    from safetensors.torch import load_file

    for ema, right in ((True, made[2]), (False, made[1][-1])):
        exported = toolkit.export(tmp_path / "run", tmp_path / f"out-{ema}", ema=ema)
        found = load_file(exported.folder / "model.safetensors")
        assert all(torch.equal(found[name], tensor) for name, tensor in right.items())
    assert "averaged weights" in (tmp_path / "out-True/README.md").read_text()
    with pytest.raises(InputError, match=r"--neftune: this installation has no toolkit/options/neftune"):
        export(tmp_path / "run", tmp_path / "out", weights_of="neftune")
    without = resolved_from(recipe(tiny_root, "single", run={}))
    steps_job_without(without, tmp_path / "plain/checkpoints")
    with pytest.raises(InputError, match=r"--ema: it has no average of the weights"):
        export(tmp_path / "plain", tmp_path / "out", weights_of="ema")
    with pytest.raises(InputError, match=r"run\.ema \(checkpoint: None, recipe: "):
        checkpoint.load(
            open_session(resolved_from(recipe(tiny_root, "single"))), tmp_path / "plain/checkpoints/step-00000000"
        )


def steps_job_without(resolved: Resolved, folder: Path) -> None:
    checkpoint.save(open_session(resolved), folder, Progress())


def test_it_averages_float32_weights(tiny_root: Path) -> None:
    with pytest.raises(InputError, match=r"run\.ema: averages float32 weights, and precision: bf16-pure has none"):
        resolved_from(recipe(tiny_root, "single", precision="bf16-pure"))


@every_case("strategy", ["single", "ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2"])
def test_plan_counts_four_bytes_a_parameter_spread_as_the_state(strategy: str, tiny_root: Path) -> None:
    resident = []
    for run in ({}, {"ema": EMA}):
        resolved = resolved_from(recipe(tiny_root, strategy, run=run))
        holdings = build(resolved).holdings
        resident.append(strategy_of(resolved).memory_model()(holdings, resolved).resident["optimizer"])
    ranks = 1 if strategy in ("single", "ddp") else 2
    assert resident[1] - resident[0] == 4 * -(-holdings.elements(True) // ranks)
