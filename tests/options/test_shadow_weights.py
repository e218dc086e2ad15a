"""An option of somebody else that keeps weights beside those that train, through verify, a fault, export and plan."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs import loader_for
from tiny import recipe_dict
from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.planning.skeleton import build
from toolkit.plugins import VARIABLE, load_plugins
from toolkit.recipe.schema import Recipe
from toolkit.rooms import REGISTERED
from toolkit.strategies import resolve, strategy_of
from toolkit.training import checkpoint
from toolkit.training.export import export
from toolkit.training.loop import Progress, train
from toolkit.training.session import open_session
from toolkit.verification.run import verify

PLUGIN = '''
"""The mean of the weights after all updates so far."""

import sys
from typing import Any

from toolkit.rooms import Option, Shadow


class Mean(Option):
    name = "mean-weights"
    title = "the mean of the weights after all updates"
    claim = None
    missing = ""
    shadow = Shadow("mean", "the mean of all weights so far", "mean weights", "mean-wrong", "mean-lost")

    def apply(self, model: Any, settings: Any) -> None:
        pass

    def keep(self, engine: Any, settings: Any) -> Any:
        import torch

        from toolkit.training.shadow import ShadowWeights

        class Kept(ShadowWeights):
            @torch.no_grad()
            def update(self, updates: int) -> None:
                for mean, weight in zip(self.tensors, self.engine.masters(), strict=True):
                    mean.lerp_(weight, share(updates))

        return Kept(engine)

    def plain(self, settings: Any) -> Any:
        from toolkit.reference.option import PlainOption

        class Plain(PlainOption):
            roundings = 3

            def shadow(self, before: Any, weight: Any, updates: int) -> Any:
                return (before.double() * (updates - 1) + weight.double()) / updates

        return Plain()

    def faults(self) -> list[Any]:
        from toolkit.verification.faults.base import Fault

        class Lagging(Fault):
            id = "mean-lags"
            title = "the mean takes in half of each update's weights"
            stages = ("update",)
            diagnoses = ("mean-wrong",)
            needs = {"options": {"mean-weights": {}}}

            def inject(self, patch: Any, case: Any) -> None:
                def half(right: Any) -> Any:
                    def wrong(updates: int) -> float:
                        self.reached()
                        return right(updates) / 2

                    return wrong

                patch(sys.modules[__name__], "share", half)

        return [Lagging]

    def diagnoses(self) -> dict[str, Any]:
        from toolkit.verification.diagnose.known import Known

        return {
            "mean-wrong": Known("the mean of the weights is wrong", "{count} means, first {first}"),
            "mean-lost": Known("the mean of the weights is not restored", "{differing}"),
        }


def share(updates: int) -> float:
    return 1 / updates
'''
NAME = "mean-weights"


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    file = tmp_path_factory.mktemp("plugin") / "mean_weights.py"
    file.write_text(PLUGIN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(file))
        load_plugins()
        yield
    del REGISTERED[NAME]


@pytest.fixture(scope="module")
def group(plugin: None, launches: None) -> Iterator[WorkerGroup]:
    """Two processes that know the option: they inherit the variable."""
    with WorkerGroup(2) as workers:
        yield workers


def resolved(root: Path, name: str = "fsdp2", **sections: Any) -> Any:
    processes = 1 if name == "single" else 2
    values = {"options": {NAME: {}}, "strategy": {"name": name}, "machine": {"processes": processes}, **sections}
    return resolve(Recipe.model_validate(recipe_dict(root, **values)), device="cpu")


def test_verify_compares_each_update_and_the_resume(tiny_root: Path, group: WorkerGroup) -> None:
    outcome = verify(resolved(tiny_root), group=group, time_limit=120)
    assert outcome.verdict == "equivalent", (outcome.difference, outcome.failure, outcome.unproven)
    for name in ("update", "round-trip"):
        [stage] = [stage for stage in outcome.passes[0].stages if stage.name == name]
        means = [measure for measure in stage.measures if measure.kind == "mean"]
        assert means, name
        assert means[0].tensor.endswith(" mean")
        assert means[0].sentence == "the mean of all weights so far"


def test_its_fault_is_found_and_named(tiny_root: Path, group: WorkerGroup) -> None:
    outcome = verify(resolved(tiny_root), group=group, fault="mean-lags", time_limit=120, stop_early=True)
    assert outcome.verdict == "different"
    assert outcome.diagnosis is not None
    assert outcome.diagnosis.id == "mean-wrong"


def test_an_export_has_its_weights(plugin: None, tiny_root: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    session, seen, progress = open_session(resolved(tiny_root, "single")), [], Progress()
    names = list(session.engine.shapes)
    train(session, loader_for(session.resolved, 0), 3, progress,
          lambda pending: seen.append({name: session.engine.full_weight(name) for name in names}))  # fmt: skip
    checkpoint.save(session, tmp_path / "run/checkpoints", progress)
    export(tmp_path / "run", tmp_path / "out", weights_of=NAME)
    written = load_file(tmp_path / "out/model.safetensors")
    for name in names:
        mean = torch.stack([weights[name] for weights in seen]).double().mean(0)
        assert (written[name] - mean).norm() < 1e-6 * mean.norm(), name
        assert not torch.equal(written[name], seen[-1][name]), name
    assert "mean weights" in (tmp_path / "out/README.md").read_text()


def test_plan_counts_it(plugin: None, tiny_root: Path) -> None:
    held = []
    for options in ({}, {NAME: {}}):
        made = resolved(tiny_root, "ddp", options=options)
        holdings = build(made).holdings
        held.append(strategy_of(made).memory_model()(holdings, made).resident["optimizer"])
    assert held[1] - held[0] == 4 * holdings.elements(True)


def test_layers_in_parts_have_not_been_verified_with_it(plugin: None, tiny_root: Path) -> None:
    with pytest.raises(InputError, match=rf"mesh\.tensor: has not been verified with options\.{NAME}; remove it"):
        resolved(tiny_root, strategy={"name": "fsdp2", "mesh": {"tensor": 2}})
