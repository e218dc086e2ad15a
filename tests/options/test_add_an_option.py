"""The option of docs/how-to/add-an-option.md, in that file alone, through config, train, verify, plan, import and docs.

Nothing in the package knows it; TOOLKIT_PLUGINS names the file that the page's block of code is written to.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from cases import every_case
from jobs import plain_run
from plugin_pages import plugin_of
from tiny import recipe_dict
from toolkit import import_config
from toolkit.cli import app
from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.plugins import VARIABLE, load_plugins
from toolkit.recipe.earlier import read_earlier, recipe_version
from toolkit.recipe.load import load_recipe
from toolkit.recipe.schema import Recipe
from toolkit.rooms import REGISTERED, Option
from toolkit.strategies import resolve
from toolkit.verification.run import verify

NAME = "soft-cap"
CAP = {"options": {NAME: {"cap": 0.1}}}  # logits of the small random models are about 0.1


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with plugin_of("add-an-option.md", tmp_path_factory.mktemp("plugin"), REGISTERED, NAME) as file:
        yield file


@pytest.fixture(scope="module")
def group(plugin: Path, launches: None) -> Iterator[WorkerGroup]:
    """Two processes that know the option: they inherit the variable."""
    with WorkerGroup(2) as workers:
        yield workers


def recipe(tiny_root: Path, **sections: Any) -> dict[str, Any]:
    return recipe_dict(tiny_root, **(CAP | sections))


def resolved(tiny_root: Path, **sections: Any) -> Any:
    return resolve(Recipe.model_validate(recipe(tiny_root, **sections)), device="cpu")


@pytest.fixture
def recipe_file(plugin: Path, tiny_root: Path, tmp_path: Path) -> Path:
    file = tmp_path / "recipe.yaml"
    run = {"max_steps": 2, "output_dir": str(tmp_path / "run")}
    file.write_text(yaml.safe_dump(recipe(tiny_root, run=run), sort_keys=False))
    return file


def test_config_says_what_no_file_has(recipe_file: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["config", str(recipe_file), "-o", str(tmp_path / "launch"), "--explain"])
    assert done.exit_code == 0, done.output
    assert re.search(r"^options\.soft-cap .*not in training_args\.json", done.output, re.MULTILINE)


@every_case(
    ("written", "message"),
    [
        ({NAME: {"cap": "much"}}, r"recipe\.yaml:\d+:\d+: options\.soft-cap\.cap: input should be a valid number"),
        ({NAME: {"cap": 0.5, "kap": 1}}, r"recipe\.yaml:\d+:\d+: options\.soft-cap\.kap: unknown .* mean cap\?"),
        ({NAME: {}}, r"options\.soft-cap\.cap: missing"),
        ({"hard-cap": {}}, r"recipe\.yaml:\d+:\d+: options\.hard-cap: .*\(known: soft-cap\); TOOLKIT_PLUGINS"),
    ],
)
def test_its_keys_are_typed(recipe_file: Path, written: dict[str, Any], message: str) -> None:
    values = yaml.safe_load(recipe_file.read_text())
    recipe_file.write_text(yaml.safe_dump(values | {"options": written}, sort_keys=False))
    with pytest.raises(InputError, match=message):
        load_recipe(recipe_file)


@every_case(
    ("sections", "message"),
    [
        ({"loss": "fused"}, "loss: fused computes no logits"),
        (
            {"strategy": {"name": "ddp", "mesh": {"context": 2}}},
            "strategy.mesh.context: has not been verified with options.soft-cap",
        ),
    ],
)
def test_what_it_cannot_be_with(plugin: Path, tiny_root: Path, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolved(tiny_root, **sections)


def test_a_recipe_without_it_is_written_as_before(plugin: Path, tiny_root: Path) -> None:
    assert "options" not in Recipe.model_validate(recipe_dict(tiny_root)).model_dump(mode="json")
    assert Recipe.model_validate(recipe(tiny_root)).model_dump(mode="json")["options"] == CAP["options"]


def test_a_checkpoint_of_it_says_which_module_is_missing(tiny_root: Path) -> None:
    """As another process reads it, which was not told of the file."""
    values = recipe_dict(tiny_root) | {"options": {"gone": {}}}
    with pytest.raises(InputError, match=r"options\.gone: no module .* name that in TOOLKIT_PLUGINS; else use"):
        read_earlier(values, recipe_version(), "recipe.json")


@every_case("lacks", ["title", "claim", "missing"])
def test_an_option_without_a_part_is_refused_where_it_is_loaded(lacks: str) -> None:
    parts = {"name": "half", "title": "a half", "claim": ("half", "halves"), "missing": "no-half"}
    del parts[lacks]
    with pytest.raises(TypeError, match=rf"option 'half' has no {lacks} "):
        type("Half", (Option,), parts)
    assert "half" not in REGISTERED


def test_two_files_of_one_name_are_not_one_plugin(tmp_path: Path) -> None:
    files = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        files.append(tmp_path / folder / "same_name.py")
        files[-1].write_text(f"FOLDER = {folder!r}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, ",".join(map(str, files)))
        with pytest.raises(
            InputError, match=r"b/same_name\.py: cannot be imported: .*a/same_name\.py has the same file"
        ):
            load_plugins()


@pytest.mark.usefixtures("launches")
def test_the_command_trains(recipe_file: Path, tiny_root: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "toolkit", "train", str(recipe_file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "run/result.json").read_text())
    # Logits within the cap of zero: no loss is further from ln(300) than twice the cap.
    assert abs(result["final_loss"] - math.log(300)) < 0.2
    other = plain_run(resolve(Recipe.model_validate(recipe_dict(tiny_root)), device="cpu"), 2)
    assert result["final_loss"] != pytest.approx(other.losses[-1], rel=1e-5), "the option changes nothing"


def test_verify_proves_it(tiny_root: Path, group: WorkerGroup) -> None:
    outcome = verify(resolved(tiny_root), group=group, time_limit=120)
    assert outcome.verdict == "equivalent", (outcome.difference, outcome.failure, outcome.unproven)
    [seen] = [claim for claim in outcome.passes[0].claims if claim.id == "soft-cap"]
    assert seen.ok


def test_its_fault_is_found_and_named(tiny_root: Path, group: WorkerGroup) -> None:
    outcome = verify(resolved(tiny_root), group=group, fault="soft-cap-ignored", time_limit=120, stop_early=True)
    assert outcome.verdict == "different"
    assert outcome.diagnosis is not None
    assert outcome.diagnosis.id == "logits-not-capped"


def test_plan_traces_it(recipe_file: Path, tmp_path: Path) -> None:
    peaks = []
    for target, words in (("with", ["options.soft-cap.cap=0.5"]), ("without", ["options={}"])):
        file = tmp_path / f"{target}.json"
        done = CliRunner().invoke(app, ["plan", str(recipe_file), *words, "--gpu", "h100", "--json", str(file)])
        assert done.exit_code == 0, done.output
        peaks.append(next(c["peak_bytes"] for c in json.loads(file.read_text())["candidates"] if c["asked"]))
    assert peaks[0] > peaks[1], "tanh keeps its output for the backward"


def test_import_reads_the_key_of_another_tool(plugin: Path, tmp_path: Path) -> None:
    file = tmp_path / "axolotl.yaml"
    written = {
        "base_model": "org/model", "datasets": [{"path": "org/data", "type": "completion"}], "sequence_len": 2048,
        "micro_batch_size": 2, "num_epochs": 2, "learning_rate": 1e-4, "final_logit_softcapping": 30,
    }  # fmt: skip
    file.write_text(yaml.safe_dump(written))
    made = import_config([file])
    assert made.recipe is not None, made.blocks
    assert made.recipe.options == {NAME: {"cap": 30.0}}


def test_the_page_of_recipes_lists_it(plugin: Path) -> None:
    from docsite.recipe_page import reference

    assert "### options.soft-cap\n\nLogits are capped softly" in reference()
    assert "| `cap` | float | required |" in reference()
