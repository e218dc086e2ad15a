"""The layout of docs/how-to/add-a-layout.md, in that file alone, through config, train, verify, plan, export and docs.

Nothing in the package knows it; TOOLKIT_PLUGINS names the file that the page's block of code is written to.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from typer.testing import CliRunner

from cases import every_case
from jobs import assert_weights, plain_run, train_job
from plugin_pages import plugin_of
from tiny import LLAMA, recipe_dict
from toolkit.cli import app
from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.recipe.earlier import read_earlier, recipe_version
from toolkit.recipe.json_schema import recipe_schema
from toolkit.recipe.load import load_recipe
from toolkit.recipe.schema import Recipe
from toolkit.rooms import REGISTERED
from toolkit.strategies import resolve
from toolkit.verification.run import verify

NAME = "vocabulary"
TWO = {"strategy": {"name": "fsdp2", "mesh": {NAME: 2}}}


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with plugin_of("add-a-layout.md", tmp_path_factory.mktemp("plugin"), REGISTERED, NAME) as file:
        yield file


@pytest.fixture(scope="module")
def group(plugin: Path, launches: None) -> Iterator[WorkerGroup]:
    """Two processes that know the layout: they inherit the variable."""
    with WorkerGroup(2) as workers:
        yield workers


def resolved(tiny_root: Path, **sections: Any) -> Any:
    return resolve(Recipe.model_validate(recipe_dict(tiny_root, **(TWO | sections))), device="cpu")


@pytest.fixture
def recipe_file(plugin: Path, tiny_root: Path, tmp_path: Path) -> Path:
    file = tmp_path / "recipe.yaml"
    run = {"max_steps": 2, "output_dir": str(tmp_path / "run")}
    file.write_text(yaml.safe_dump(recipe_dict(tiny_root, **TWO, run=run), sort_keys=False))
    return file


def test_recipes_schema_and_pages_have_its_axis(recipe_file: Path, tiny_root: Path, tmp_path: Path) -> None:
    from docsite.recipe_page import reference

    done = CliRunner().invoke(app, ["config", str(recipe_file), "-o", str(tmp_path / "launch"), "--explain"])
    assert done.exit_code == 0, done.output
    assert re.search(r"^strategy\.mesh\.vocabulary +2 +consecutive ranks that divide the rows", done.output, re.M)
    assert (found := resolved(tiny_root)).mesh.axes == {NAME: 2}
    assert (found.data_size, found.mesh.layer_ranks(1), found.mesh.state_peers(1)) == (1, [0, 1], [1])
    mesh = recipe_schema()["$defs"]["MeshAxes"]
    assert mesh["properties"][NAME]["minimum"] == 1
    assert not mesh["additionalProperties"]
    assert "| `vocabulary` | int | `1` | consecutive ranks that divide the rows" in reference()
    plain = Recipe.model_validate(recipe_dict(tiny_root, strategy={"name": "fsdp2", "mesh": {"shard": 2}}))
    assert NAME not in plain.model_dump(mode="json")["strategy"]["mesh"], "other recipes are written as before"
    # As another process reads a checkpoint of it, which was not told of the file.
    values = recipe_dict(tiny_root, strategy={"name": "fsdp2", "mesh": {"gone": 2}})
    with pytest.raises(InputError, match=r"strategy\.mesh\.gone: .* name that in TOOLKIT_PLUGINS; else use"):
        read_earlier(values, recipe_version(), "recipe.json")


@every_case(
    ("mesh", "message"),
    [
        ({NAME: "two"}, r"recipe\.yaml:\d+:\d+: strategy\.mesh\.vocabulary: input should be a valid integer"),
        ({NAME: 0}, r"strategy\.mesh\.vocabulary: input should be greater than or equal to 1"),
        ({"vocabulari": 2}, r"strategy\.mesh\.vocabulari: unknown key; did you mean vocabulary\?"),
    ],
)
def test_its_size_is_typed(recipe_file: Path, mesh: dict[str, Any], message: str) -> None:
    values = yaml.safe_load(recipe_file.read_text())
    values["strategy"]["mesh"] = mesh
    recipe_file.write_text(yaml.safe_dump(values, sort_keys=False))
    with pytest.raises(InputError, match=message):
        load_recipe(recipe_file)


FOUR = {"processes": 4}


@every_case(
    ("sections", "message"),
    [
        ({"loss": "fused"}, "loss: fused multiplies by the whole head, which strategy.mesh.vocabulary divides"),
        ({"precision": "fp16"}, "strategy.mesh.vocabulary: has not been verified with fp16"),
        ({"model": {"config": LLAMA | {"vocab_size": 301}}}, "vocabulary: 2 ranks cannot divide 301 tokens"),
        ({"model": {"config": LLAMA, "neftune_alpha": 5.0}}, "vocabulary: has not been verified with model.neftune"),
        ({"strategy": {"name": "ddp", "mesh": {NAME: 2}}},
         r"vocabulary: ddp does not divide the vocabulary; set strategy.name: fsdp2 and .*: {vocabulary: 2}"),
        ({"strategy": {"name": "fsdp2", "mesh": {NAME: 2, "tensor": 2}}, "machine": FOUR},
         "vocabulary: is not supported beside tensor: it has not been verified; set strategy.name: fsdp2 and"),
        ({"strategy": {"name": "fsdp2", "mesh": {NAME: 4}}},
         "shard 1 x vocabulary 4 = 4, but there are 2 processes; set vocabulary to a divisor of 2"),
        ({"strategy": {"name": "fsdp2", "mesh": {NAME: 4}}, "machine": {"processes": 2, "nodes": 2}},
         "vocabulary: 4 consecutive ranks add up hidden states and have to be on one node, which has 2 processes"),
    ],
)  # fmt: skip
def test_what_it_cannot_be_with(plugin: Path, tiny_root: Path, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolved(tiny_root, **sections)


def test_its_fault_is_found_and_named(tiny_root: Path, group: WorkerGroup) -> None:
    own = resolved(tiny_root)
    outcome = verify(own, group=group, fault="vocabulary-offset-ignored", time_limit=200, stop_early=True)
    assert outcome.verdict == "different"
    assert outcome.diagnosis is not None
    assert outcome.diagnosis.id == "rows-without-offset"


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_verify_proves_it(tied: bool, tiny_root: Path, group: WorkerGroup) -> None:
    """At night also where the embedding and the head share a weight."""
    own = resolved(tiny_root, model={"config": LLAMA | {"tie_word_embeddings": tied}})
    outcome = verify(own, group=group, time_limit=200)
    assert outcome.verdict == "equivalent", (outcome.difference, outcome.failure, outcome.unproven)
    logic = outcome.passes[0]
    claims = {claim.id: claim for claim in logic.claims}
    assert claims["layers-divided"].ok
    assert claims["mesh-collectives"].expected == "all-reduce vocabulary"
    assert logic.replayed is not None
    assert logic.replayed.from_natural, "held against the whole head, too"


@pytest.mark.nightly  # four processes: parts that are sharded, and sums that a collective takes in its own order
@pytest.mark.parametrize("mesh", [{"shard": 2, NAME: 2}, {NAME: 4}], ids=str)
@pytest.mark.usefixtures("plugin", "launches")
def test_verify_proves_it_on_four(mesh: dict[str, int], tiny_root: Path) -> None:
    own = resolved(tiny_root, strategy={"name": "fsdp2", "mesh": mesh}, machine=FOUR, precision="bf16")
    outcome = verify(own, time_limit=300)
    assert outcome.verdict == "equivalent", (outcome.difference, outcome.failure, outcome.unproven)


@pytest.mark.nightly  # `verify` holds the same steps against the plain loop
def test_training_equals_the_plain_loop(tiny_root: Path, group: WorkerGroup) -> None:
    own = resolved(tiny_root)
    plain, run = plain_run(own, 4), group.run(train_job, own, 4)[0]
    assert run.losses == pytest.approx(plain.losses, rel=1e-5)
    assert_weights(run, plain)


def test_plan_counts_its_bytes_and_what_it_sends(recipe_file: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    done = CliRunner().invoke(app, ["plan", str(recipe_file), "--gpu", "h100", "--json", str(file)])
    assert done.exit_code == 0, done.output
    own = next(one for one in json.loads(file.read_text())["candidates"] if one["asked"])
    assert own["mesh"] == {"replicate": 1, "shard": 1, NAME: 2}
    vocabulary, others = 2 * 300 * 32, 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32) + 32
    assert own["breakdown"]["optimizer"] == 2 * 4 * (vocabulary // 2 + others), "two moments of this rank's part"
    tokens, micro_batches = 2 * 48, 2
    hidden, logits = 4 * 32 * tokens, 4 * 300 * tokens
    # Of two ranks each sends half of what is added up twice, of what is gathered once: embeddings, the gradient of the
    # last hidden states, and the logits.
    assert own["sent_bytes"] == {NAME: micro_batches * (2 * hidden + logits / 2)}


@pytest.mark.nightly  # two launches of the command
@pytest.mark.usefixtures("launches")
def test_the_command_trains_exports_and_another_mesh_resumes(
    recipe_file: Path, tiny_root: Path, tmp_path: Path
) -> None:
    def toolkit(*words: object) -> None:
        command = [sys.executable, "-m", "toolkit", *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr

    toolkit("train", recipe_file, "run.save_every=2", "schedule={name: constant}")
    for steps in (2, 4):
        toolkit("export", tmp_path / "run", "-o", tmp_path / f"exported-{steps}")
        exported = load_file(tmp_path / f"exported-{steps}/model.safetensors")
        constant = {"name": "constant", "warmup_steps": None}
        plain = plain_run(resolved(tiny_root, schedule=constant), steps)
        for name, weight in plain.weights.items():
            assert torch.allclose(exported[name].float(), weight, rtol=1e-4, atol=1e-6), name
        if steps == 2:
            again = ["strategy.mesh={shard: 2}", "batch.micro_size=1", "run.max_steps=4"]
            toolkit("train", recipe_file, "--resume", "run.save_every=2", "schedule={name: constant}", *again)
