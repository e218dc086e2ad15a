"""``from toolkit import ...``: the commands as functions, with the commands' JSON."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import toolkit
from tiny import recipe_dict
from toolkit import InputError, Recipe, load_recipe, resolve, write_config
from toolkit.cli import app

ALONE = {"strategy": {"name": "single"}, "machine": {"processes": 1}}


@pytest.fixture
def recipe(tiny_root: Path, tmp_path: Path) -> Recipe:
    run = {"max_steps": 3, "output_dir": str(tmp_path / "run"), "save_every": 3}
    return Recipe.model_validate(recipe_dict(tiny_root, run=run, **ALONE))


def command(*arguments: object) -> tuple[int, dict[str, Any]]:
    """Exit status and JSON of a command."""
    done = CliRunner().invoke(app, [*map(str, arguments), "--json", "-"])
    return done.exit_code, json.loads(done.stdout)


def without_times(document: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key not in ("started", "seconds")}


def test_names_stay_functions_whatever_is_imported() -> None:
    """A submodule of the same name would replace the function once it is imported."""
    import toolkit.benchmark.command
    import toolkit.linting.engine
    import toolkit.migration
    import toolkit.planning.command
    import toolkit.training.export
    import toolkit.verification.command

    others = {"InputError", "Recipe", "Recorder", "RunFailed", "Stopped", "ToolkitError"}
    for name in set(toolkit.__all__) - others:
        assert inspect.isfunction(getattr(toolkit, name)), name
    assert set(toolkit.__all__) <= set(dir(toolkit))
    with pytest.raises(AttributeError, match="nothing_like_it"):
        toolkit.nothing_like_it  # noqa: B018


def test_every_function_documents_what_it_raises_and_has_types() -> None:
    for name in (
        "bench",
        "compare_checkpoints",
        "export",
        "import_config",
        "inspect_data",
        "lint",
        "migrate",
        "plan",
        "train",
        "verify",
        "write_config",
    ):
        function = getattr(toolkit, name)
        assert "Raises InputError" in inspect.getdoc(function), name
        signature = inspect.signature(function)
        assert all(p.annotation is not p.empty for p in signature.parameters.values()), name
        assert signature.return_annotation is not signature.empty, name


def test_config_of_an_object_is_that_of_its_file(recipe: Recipe, tmp_path: Path) -> None:
    made = write_config(recipe, tmp_path / "launch", overrides=["strategy.name=zero2", "machine.processes=2"])
    assert (made.exit_code, made.resolved.recipe.strategy.name) == (0, "zero2")
    written = {path.name for path in made.files}
    assert {"accelerate.yaml", "deepspeed.json", "launch.sh", "recipe.yaml", "training_args.json"} <= written
    assert {decision.key for decision in made.decisions} >= {"zero.stage", "world_size"}
    again = load_recipe(tmp_path / "launch" / "recipe.yaml", ["strategy.name=zero2", "machine.processes=2"])
    assert resolve(again).recipe == made.resolved.recipe
    _, theirs = command("config", tmp_path / "launch" / "recipe.yaml", "-o", tmp_path / "launch", "strategy.name=zero2",
                        "machine.processes=2")  # fmt: skip
    ours = made.to_json() | {"files": [file for file in made.to_json()["files"] if not file.endswith("recipe.yaml")]}
    assert without_times(json.loads(json.dumps(ours))) == without_times(theirs)


def test_errors_are_one_family(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(toolkit.ToolkitError, match=r"strategy\.offload"):
        write_config(recipe, tmp_path / "launch", overrides=["strategy.offload=all"])
    with pytest.raises(InputError, match=r"nowhere\.yaml"):
        toolkit.train(tmp_path / "nowhere.yaml")
    assert issubclass(toolkit.RunFailed, toolkit.ToolkitError)


@pytest.mark.usefixtures("launches")
def test_train_and_export(recipe: Recipe, tmp_path: Path) -> None:
    done = toolkit.train(recipe, ["optimizer.lr=0.002"])
    assert done.to_json() == json.loads((tmp_path / "run" / "result.json").read_text())
    assert (done.steps, done.exit_code) == (3, 0)
    assert done.tokens > 0
    assert done.final_loss == done.to_json()["final_loss"]
    assert done.checkpoint is not None
    script = (tmp_path / "run" / "launch" / "launch.sh").read_text()
    assert str(tmp_path / "run" / "launch" / "recipe.yaml") in script
    again = load_recipe(tmp_path / "run" / "launch" / "recipe.yaml", ["optimizer.lr=0.002"])
    assert again.run == recipe.run
    exported = toolkit.export(done.checkpoint, tmp_path / "model")
    assert (exported.kind, exported.folder) == ("full model", tmp_path / "model")
    assert exported.to_json()["output"] == str(tmp_path / "model")
    assert (tmp_path / "model" / "config.json").exists()


def test_plan_of_an_object(recipe: Recipe, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe.model_dump(mode="json", exclude_unset=True)))
    from_object = toolkit.plan(recipe, gpu="h100")
    from_file = toolkit.plan(file, gpu="h100")
    assert from_object.fits
    assert from_object.candidates[0].asked
    assert from_object.chosen is not None
    left, right = (without_times(found.to_json()) for found in (from_object, from_file))
    assert left == right


def test_data_of_an_object_is_that_of_its_file(recipe: Recipe, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe.model_dump(mode="json", exclude_unset=True)))
    found = toolkit.inspect_data(recipe, ["data.max_length=20"], samples=2)
    status, theirs = command("data", file, "data.max_length=20", "--samples", 2)
    assert without_times(json.loads(json.dumps(found.to_json()))) == without_times(theirs)
    assert (found.exit_code, status) == (0, 0)
    assert (found.samples, found.tokens, found.cut) == (30, theirs["tokens"], theirs["cut"])
    assert (found.supervised, found.padding_share) == (theirs["supervised"], theirs["padding_share"])
    assert [shown.tokens for shown in found.shown] == [one["tokens"] for one in theirs["shown"]]


@pytest.mark.usefixtures("launches")
def test_verify_and_bench(recipe: Recipe, tmp_path: Path) -> None:
    proven = toolkit.verify(recipe, log=tmp_path / "verify.log")
    assert (proven.verdict, proven.exit_code, proven.diagnosis) == ("equivalent", 0, None)
    assert proven.to_json()["passes"][0]["stages"]
    measured = toolkit.bench(recipe, turns=1, steps=1, warmup=1, log=tmp_path / "bench.log")
    assert measured.exit_code == 0, measured.to_json()
    assert measured.to_json()["cells"][0]["tokens_per_second"] == pytest.approx(measured.cells[0].rates[0])


def test_lint_and_migrate(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True},
                                "train_micro_batch_size_per_gpu": 1, "unknown_key": 1}))  # fmt: skip
    found = toolkit.lint([file])
    assert found.to_json()["findings"]
    assert [finding.code for finding in found.findings] == [f["code"] for f in found.to_json()["findings"]]
    assert found.exit_code == (1 if any(f.severity != "note" for f in found.findings) else 0)
    _, theirs = command("lint", file)
    assert without_times(found.to_json()) == without_times(theirs)
