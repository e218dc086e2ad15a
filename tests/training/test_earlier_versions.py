"""What earlier versions saved is resumed, to the bit by the strategy that saved it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import earlier_versions
import pytest
import torch
from safetensors.torch import load_file

from jobs import Run, resolved_from, worst
from toolkit.launch.group import WorkerGroup
from toolkit.training.finding import tensors_of

VERSIONS = earlier_versions.kept()


def end_of(run: Run) -> dict[str, torch.Tensor]:
    return {**{f"weight.{name}": weight for name, weight in run.weights.items()}, **run.moments}


def resumed(group: WorkerGroup, saved: Path, strategy: str) -> Run:
    resolved = resolved_from(earlier_versions.recipe_of(strategy))
    left = earlier_versions.STEPS - earlier_versions.SAVED_AT
    checkpoint = saved / f"step-{earlier_versions.SAVED_AT:08d}"
    run: Run = group.run(earlier_versions.train_here, resolved, left, None, str(checkpoint), earlier_versions.STEPS)[0]
    return run


def without_padding(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Before 2026-11-30 a model that was drawn had zeros for the padding token, 0, that no sample here has."""
    weights["model.embed_tokens.weight"][0] = 0
    return weights


@pytest.fixture(scope="module")
def first_steps(group: WorkerGroup) -> dict[str, dict[str, torch.Tensor]]:
    """By strategy: the weights after the steps that the kept checkpoints were saved after, trained here and now."""
    found = {}
    for strategy in earlier_versions.STRATEGIES:
        arguments = resolved_from(earlier_versions.recipe_of(strategy)), earlier_versions.SAVED_AT, None, None
        run = group.run(earlier_versions.train_here, *arguments, earlier_versions.STEPS)[0]
        found[strategy] = without_padding(run.weights)
    return found


NAMES = earlier_versions.STRATEGIES
IN_TURN = {version: NAMES[at % len(NAMES)] for at, version in enumerate(VERSIONS)}
"""Of each version the strategy that the default set resumes it under."""


@pytest.mark.parametrize(
    ("version", "strategy"),
    [
        pytest.param(
            version, name, marks=() if IN_TURN[version] == name else pytest.mark.nightly, id=f"{version.name}-{name}"
        )
        for version in VERSIONS
        for name in NAMES
    ],
)
def test_resumed_equals_the_run_that_was_not_interrupted(
    version: Path, strategy: str, group: WorkerGroup, first_steps: dict[str, dict[str, torch.Tensor]]
) -> None:
    """To the bit where this machine gives the first steps' bits. Another processor, or another torch, may add in
    another order: then all that follows has the tolerance of `test_any_strategy_resumes_any_other`."""
    saved = without_padding(dict(tensors_of(version / strategy / "step-00000003")))
    run, end = resumed(group, version / strategy, strategy), load_file(version / strategy / "end.safetensors")
    losses = json.loads((version / strategy / "losses.json").read_text())[earlier_versions.SAVED_AT :]
    if all(torch.equal(first_steps[strategy][name], weight) for name, weight in saved.items()):
        assert run.losses == losses
        assert all(torch.equal(tensor, end[name]) for name, tensor in end_of(run).items())
    else:
        assert run.losses == pytest.approx(losses, rel=1e-6)
        assert worst(first_steps[strategy], saved)[0] < 1e-6
        assert worst(end_of(run), end)[0] < 1e-5


@pytest.mark.nightly
@pytest.mark.parametrize(("saved", "strategy"), [("zero2", "fsdp2"), ("fsdp2", "ddp")])
@pytest.mark.parametrize("version", VERSIONS, ids=lambda path: path.name)
def test_another_strategy_resumes_it(version: Path, saved: str, strategy: str, group: WorkerGroup) -> None:
    """Within the tolerances of `test_any_strategy_resumes_any_other`."""
    run, end = resumed(group, version / saved, strategy), load_file(version / saved / "end.safetensors")
    weights = {name: tensor for name, tensor in end.items() if name.startswith("weight.")}
    moments = {name: tensor for name, tensor in end.items() if name not in weights}
    assert worst({f"weight.{name}": tensor for name, tensor in run.weights.items()}, weights)[0] < 1e-6
    assert worst(run.moments, moments)[0] < 1e-5


def test_a_checkpoint_of_this_schema_is_kept() -> None:
    """A key that is new, gone or of another default may break what was saved before it: keep a checkpoint of each."""
    now = earlier_versions.outline()
    known: list[dict[str, Any]] = [json.loads((path / "about.json").read_text())["schema"] for path in VERSIONS]
    nearest = min(known, key=lambda old: len(_differences(old, now)))
    changed = ", ".join(_differences(nearest, now))
    assert not changed, (
        f"toolkit/recipe/schema.py has changed ({changed}) since the last checkpoint that was kept. Add one of this "
        "version and commit it: .venv/bin/python tests/training/earlier_versions.py write"
    )


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    return [key for key in {**old, **new} if old.get(key) != new.get(key)]
