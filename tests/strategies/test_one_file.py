"""One more strategy, defined in this file alone, through config, train, verify, plan and bench.

``mirrored``: consecutive pairs of processes get the same samples, so the data-parallel size is half the number of
processes. Nothing in the package knows the strategy; TOOLKIT_PLUGINS names this file.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from jobs import plain_run, train_job, worst
from tiny import recipe_dict
from toolkit.cli import app
from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.plugins import VARIABLE, load_plugins
from toolkit.recipe.schema import Recipe
from toolkit.recipe.strategy_names import REGISTERED
from toolkit.recipe.traits import Traits
from toolkit.strategies import resolve
from toolkit.strategies.replicated import DistributedDataParallel

if __name__.startswith("toolkit_plugin_"):  # pytest imports the file too, and must not register the strategy for all

    class Mirrored(DistributedDataParallel):
        name = "mirrored"
        title = "pairs of processes train on the same samples"
        traits = Traits(
            autocast=True, collectives=(("all-reduce",),), broadcasts=True, continues_without_gradient=False
        )

        def data_size(self, recipe: Recipe) -> int:
            return max(1, recipe.machine.processes * recipe.machine.nodes // 2)


@pytest.fixture(scope="module")
def plugin() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, __file__)
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))  # for what this file imports
        load_plugins()
        yield
    del REGISTERED["mirrored"]


@pytest.fixture(scope="module")
def mirrored_group(plugin: None, launches: None) -> Iterator[WorkerGroup]:
    """Two processes that know the strategy: they inherit the variable."""
    with WorkerGroup(2) as workers:
        yield workers


@pytest.fixture
def recipe(tiny_root: Path, tmp_path: Path) -> dict[str, Any]:
    run = {"max_steps": 6, "output_dir": str(tmp_path / "run"), "save_every": 3}
    return recipe_dict(tiny_root, strategy={"name": "mirrored"}, run=run)


@pytest.fixture
def recipe_file(recipe: dict[str, Any], tmp_path: Path) -> Path:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    return file


def toolkit(*arguments: object, seconds: float = 240) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "toolkit", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)


@pytest.mark.usefixtures("launches")
def test_config_writes_its_files(plugin: None, recipe_file: Path, tmp_path: Path) -> None:
    done = toolkit("config", recipe_file, "-o", tmp_path / "launch")
    assert done.returncode == 0, done.stderr
    accelerate = yaml.safe_load((tmp_path / "launch" / "accelerate.yaml").read_text())
    assert accelerate["distributed_type"] == "MULTI_GPU"
    # Both processes get the same 2 samples, twice a step: the batch is 4, not 8.
    assert "mirrored" in (tmp_path / "launch" / "launch.sh").read_text()
    assert "global batch 4 = 2 micro x 2 accumulation" in (tmp_path / "launch" / "launch.sh").read_text()


def test_an_unknown_name_lists_it(plugin: None, recipe_file: Path) -> None:
    done = CliRunner().invoke(app, ["config", str(recipe_file), "-o", "unused", "strategy.name=mirored"])
    assert isinstance(done.exception, InputError)
    assert "did you mean mirrored?" in str(done.exception)


def test_training_equals_the_plain_loop(recipe: dict[str, Any], mirrored_group: WorkerGroup) -> None:
    resolved = resolve(Recipe.model_validate(recipe), device="cpu")
    assert (resolved.world_size, resolved.data_size, resolved.global_size) == (2, 1, 4)
    plain = plain_run(resolved, 6)
    run = mirrored_group.run(train_job, resolved, 6)[0]
    assert run.tokens == plain.tokens
    assert run.losses == pytest.approx(plain.losses, rel=1e-5)
    error, name = worst(run.weights, plain.weights)
    assert error < 1e-5, name


@pytest.mark.usefixtures("launches")
def test_the_command_trains(plugin: None, recipe_file: Path, recipe: dict[str, Any]) -> None:
    done = toolkit("train", recipe_file)
    assert done.returncode == 0, done.stderr
    result = json.loads((Path(recipe["run"]["output_dir"]) / "result.json").read_text())
    resolved = resolve(Recipe.model_validate(recipe), device="cpu")
    plain = plain_run(resolved, 6)
    assert result["tokens"] == sum(plain.tokens)
    assert result["final_loss"] == pytest.approx(plain.losses[-1], rel=1e-5)


@pytest.mark.nightly
@pytest.mark.usefixtures("launches")
def test_the_command_resumes(plugin: None, recipe_file: Path) -> None:
    assert toolkit("train", recipe_file).returncode == 0
    again = toolkit("train", recipe_file, "--resume")
    assert again.returncode == 0, again.stderr
    assert "resumed" in again.stdout + again.stderr


def test_verify_proves_it(recipe: dict[str, Any], mirrored_group: WorkerGroup) -> None:
    from toolkit.verification.run import verify

    resolved = resolve(Recipe.model_validate(recipe), device="cpu")
    outcome = verify(resolved, group=mirrored_group, time_limit=120)
    assert outcome.verdict == "equivalent", (outcome.difference, outcome.failure, outcome.unproven)


@pytest.mark.parametrize("fault", ["accum-no-divide", "lr-steps-per-process", "silent-single"])
def test_faults_apply_by_its_traits(fault: str, recipe: dict[str, Any], mirrored_group: WorkerGroup) -> None:
    from toolkit.verification.faults import fault_class
    from toolkit.verification.run import verify

    assert "mirrored" in fault_class(fault).strategies.names()
    outcome = verify(
        resolve(Recipe.model_validate(recipe), device="cpu"),
        group=mirrored_group,
        fault=fault,
        time_limit=120,
        stop_early=True,
    )
    assert outcome.verdict != "equivalent"


def test_other_samples_on_one_rank_of_a_part_are_found(recipe: dict[str, Any], mirrored_group: WorkerGroup) -> None:
    """The ledger compares ranks that share a part."""
    from copy import deepcopy

    import torch

    from toolkit.verification.compare.ledger import ledger
    from toolkit.verification.record.trace import MicroTrace, RankTrace, StepTrace

    resolved = resolve(Recipe.model_validate(recipe), device="cpu")
    ids = torch.tensor([[5, 6, 7]])
    tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    ranks = [RankTrace(0), RankTrace(1)]
    for rank in ranks:
        rank.run.steps.append(StepTrace(0, [MicroTrace(deepcopy(tensors), 1.0)]))
    assert all(measure.ok for measure in ledger(ranks, [], resolved).measures)
    ranks[1].run.steps[0].micros[0].tensors["input_ids"][0, 1] = 9
    [shared] = [m for m in ledger(ranks, [], resolved).measures if not m.ok]
    assert "ranks [1] have other samples" in shared.sentence


def test_plan_predicts_it(plugin: None, recipe_file: Path, tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    done = CliRunner().invoke(app, ["plan", str(recipe_file), "--gpu", "h100", "--json", str(target)])
    assert done.exit_code == 0, done.output
    candidates = json.loads(target.read_text())["candidates"]
    own = [c for c in candidates if c["strategy"] == "mirrored"]
    assert own[0]["asked"]
    assert own[0]["unmeasured"] == ["mirrored"]
    ddp = next(c for c in candidates if c["strategy"] == "ddp" and c["micro_size"] == own[0]["micro_size"])
    assert own[0]["peak_bytes"] > 0
    # Half the data-parallel ranks compute the same global batch: twice the micro-batches of ddp's.
    assert own[0]["accumulation"] == 2 * ddp["accumulation"]


def test_bench_measures_it(recipe: dict[str, Any], recipe_file: Path, mirrored_group: WorkerGroup) -> None:
    from toolkit.benchmark.cells import Plan, as_json, make_cells, run_cells

    cells, _ = make_cells(str(recipe_file), [], ["ddp"], [], None)
    run_cells(cells, Plan(turns=1, steps=2, warmup=1), None, lambda line: None, {2: mirrored_group})
    own, ddp = (as_json(cell, None) for cell in cells)
    assert own["strategy"] == "mirrored"
    assert own["reason"] == "", own["reason"]
    assert own["tokens_per_second"] > 0
    # Tokens that two ranks share count once: as many as one rank trained on.
    counted = cells[0].rates[0] * sum(cells[0].seconds_by_turn[0])
    assert counted == pytest.approx(sum(cells[0].turns[0][0].row_tokens[:2]))
    assert ddp["fits"]
