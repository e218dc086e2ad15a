"""Other tools' checkpoints, as the real packages write them, continued by the toolkit's loop."""

from __future__ import annotations

import json
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_writers import DECAY, LR, MODEL, Plan, make_model, make_optimizer, make_schedule
from typer.testing import CliRunner

from jobs import resolved_from, train_job
from nights import nightly_but
from signalled import TOOLKIT
from tiny import recipe_dict
from toolkit.checkpoint_import.command import ImportedCheckpoint, import_checkpoint
from toolkit.cli import app
from toolkit.errors import InputError, RunFailed
from toolkit.launch.group import WorkerGroup
from toolkit.launch.output import claim_folder, release_folder
from toolkit.recipe.schema import Recipe
from toolkit.training.finding import newest
from toolkit.verification.checkpoints.find import places, read
from toolkit.verification.checkpoints.names import canonical

Written = Callable[..., Path]
VOCAB = 300  # as many as the tests' tokenizer has
QUICK = ["plain", "zero2", "zero3", "universal3", "accelerate-fsdp2"]
EVERY = [
    "zero1", "universal2", "accelerate-plain", "accelerate-zero3", "accelerate-fsdp1",
    "accelerate-fsdp2-full", "trainer-single", "trainer-zero2", "trainer-fsdp1", "trainer-fsdp2",
]  # fmt: skip


def recipe(root: Path, folder: Path, strategy: str = "single", **sections: Any) -> dict[str, Any]:
    values = recipe_dict(
        root,
        model={"config": MODEL | {"vocab_size": VOCAB}},
        strategy={"name": strategy},
        machine={"processes": 1 if strategy == "single" else 2},
        batch={"micro_size": 4 if strategy == "single" else 2, "accumulation": 1},
        optimizer={
            "lr": LR,
            "weight_decay": DECAY,
            "max_grad_norm": None,
            "groups": [{"match": "embed_tokens", "weight_decay": DECAY}],  # the writers' embeddings decay
        },
        schedule={"name": "constant", "warmup_steps": 0},
        run={"max_steps": 20, "output_dir": str(folder), "eval_every": None},
    )
    for key, value in sections.items():
        values[key] = values.get(key, {}) | value if isinstance(value, dict) and key != "adapter" else value
    return values


def imported(source: Path, values: dict[str, Any], **options: Any) -> ImportedCheckpoint:
    return import_checkpoint(source, Recipe.model_validate(values), **options)


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("kind", nightly_but([*QUICK, *EVERY], *QUICK))
def test_every_tensor_is_the_other_tools_own(kind: str, written: Written, tiny_root: Path, tmp_path: Path) -> None:
    """Weights and both moments, bit by bit, under the model's names; and the number of steps."""
    source = written(kind, vocab=VOCAB, constant=True)
    made = imported(source, recipe(tiny_root, tmp_path))
    theirs, ours = read(places(str(source))[-1]), read(places(str(made.folder))[-1])
    assert made.step == ours.step == Plan().steps
    assert len(ours.weights) == 21
    names = {name.removeprefix("model."): name for name in theirs.weights} | {name: name for name in theirs.weights}
    for name, weight in ours.weights.items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight.read(), theirs.weights[names[name]].read()), name
    assert all(set(found) == set(ours.weights) for found in ours.moments.values())
    numbered = theirs.numbered is not None
    for moment, found in ours.moments.items():
        for name, tensor in found.items() if not numbered else ():
            assert torch.equal(tensor.read(), theirs.moments[moment][names[name]].read()), (moment, name)
    assert not [one for one in made.differences if "decay" in one]


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("strategy", nightly_but(["single", "zero2", "fsdp2"], "zero2"))
def test_the_next_step_is_the_one_that_torch_would_take(
    strategy: str, written: Written, tiny_root: Path, tmp_path: Path, group: WorkerGroup, lone_group: WorkerGroup
) -> None:
    """From a plain loop's checkpoint: torch's AdamW with its own state takes the gradient of our first step."""
    plan = Plan(vocab=VOCAB, constant=True)
    source = written("plain", vocab=VOCAB, constant=True)
    values = recipe(tiny_root, tmp_path, strategy)
    made = imported(source, values)
    assert made.differences == ()
    groups = lone_group if strategy == "single" else group
    run = groups.run(train_job, resolved_from(values), 1, None, str(made.folder), 20)[0]

    saved = torch.load(source, weights_only=True)
    model = make_model(plan)
    optimizer = make_optimizer(model, plan)
    schedule = make_schedule(optimizer, plan)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["scheduler"])
    assert optimizer.state_dict()["state"][0]["step"] == 3
    for name, parameter in model.named_parameters():
        parameter.grad = run.first_gradient[name]
    optimizer.step()
    for name, parameter in model.named_parameters():
        # AdamW's kernels round differently: a few units in the last place of the weight, and of the step.
        assert torch.allclose(run.weights[name], parameter, rtol=1e-6, atol=1e-8), name


@pytest.mark.usefixtures("launches")
def test_an_adapter_of_the_trainer_goes_on(written: Written, tiny_root: Path, tmp_path: Path) -> None:
    source = written("trainer-adapter", vocab=VOCAB)
    base = tmp_path / "base"
    make_model(Plan(vocab=VOCAB)).save_pretrained(base)
    adapter = {"method": "lora", "r": 4, "alpha": 8, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
    values = recipe(tiny_root, tmp_path / "run", adapter=adapter, optimizer={"groups": []}) | {
        "model": {"path": str(base)}
    }
    made = imported(source, values)
    theirs, ours = read(places(str(source))[-1]), read(places(str(made.folder))[-1])
    assert set(canonical(ours.weights)[0].values()) == set(theirs.weights)
    assert all(torch.equal(ours.weights[name].read(), theirs.weights[name].read()) for name in ours.weights)
    assert set(ours.moments["exp_avg"]) == set(ours.weights)


@pytest.mark.usefixtures("launches")
def test_what_the_run_did_otherwise_is_reported(written: Written, tiny_root: Path, tmp_path: Path) -> None:
    source = written("plain", vocab=VOCAB)  # its rate falls
    optimizer = {"weight_decay": 0.01, "decay": "all", "groups": []}
    made = imported(source, recipe(tiny_root, tmp_path, optimizer=optimizer, precision="bf16"))
    message = "\n".join(made.differences)
    assert "learning rate of step 4: 0.0007 in the checkpoint, 0.001 in the recipe" in message
    assert "weight decay of 16 tensors: 0.1 in the checkpoint, 0.01 in the recipe" in message
    assert "weight decay of 5 tensors: 0 in the checkpoint, 0.01 in the recipe" in message
    zero = imported(written("zero2", vocab=VOCAB), recipe(tiny_root, tmp_path / "b", precision="bf16"))
    assert "precision: the run computed in float32, the recipe in bfloat16" in zero.differences


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"config": MODEL | {"vocab_size": VOCAB, "num_hidden_layers": 3}}},
         "no weight of 9 of 30 trained tensors (model.layers.2"),
        ({"model": {"config": MODEL | {"vocab_size": 61}}},
         "weight of model.embed_tokens.weight has shape [300, 32], the recipe's model has [61, 32]"),
        ({"model": {"freeze": ["embed_tokens"]}, "optimizer": {"groups": []}},
         "model.embed_tokens.weight does not train in this recipe and has other values there"),
        ({"optimizer": {"name": "lion"}}, "optimizer.name: lion: only the moments of adamw"),
        ({"run": {"ema": {"decay": 0.9}}}, "run.ema: other tools' checkpoints have no averages"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(
    sections: dict[str, Any], message: str, written: Written, tiny_root: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as caught:
        imported(written("plain", vocab=VOCAB), recipe(tiny_root, tmp_path / "run", **sections))
    assert message in str(caught.value)
    assert not list(tmp_path.glob("run/checkpoints/*")), "nothing half-written"


def test_weights_alone_are_no_run(tiny_root: Path, tmp_path: Path) -> None:
    make_model(Plan(vocab=VOCAB)).save_pretrained(tmp_path / "weights")
    with pytest.raises(InputError, match=r"no moments of an optimizer .* set model\.path"):
        imported(tmp_path / "weights", recipe(tiny_root, tmp_path / "run"), step=3)
    with pytest.raises(InputError, match="does not say how many optimizer steps were taken; add --step N"):
        imported(tmp_path / "weights", recipe(tiny_root, tmp_path / "run"))


@pytest.mark.usefixtures("launches")
def test_the_command(written: Written, tiny_root: Path, tmp_path: Path) -> None:
    source, file = written("plain", vocab=VOCAB), tmp_path / "recipe.yaml"
    file.write_text(json.dumps(recipe(tiny_root, tmp_path / "run")))
    words = ["import-checkpoint", str(source), str(file), "schedule.name=linear", "run.max_steps=10"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    target = newest(tmp_path / "run" / "checkpoints")
    assert target is not None
    assert f"wrote {target}: step 3, 21 tensors from " in done.output
    assert "differs" not in done.output, "its rate falls to 0 over ten steps, too"
    assert f"next: toolkit train {file} schedule.name=linear run.max_steps=10 --resume" in done.output
    with pytest.raises(InputError, match="there are checkpoints of a run; set another run"):
        CliRunner().invoke(app, words, catch_exceptions=False)


@pytest.mark.usefixtures("launches")
@pytest.mark.nightly
def test_the_two_commands_of_the_docs(written: Written, tiny_root: Path, tmp_path: Path) -> None:
    """Imported in one process and trained to its end in others, as the command's last line says."""
    source, file = written("trainer-zero2", vocab=VOCAB), tmp_path / "recipe.yaml"
    run = tmp_path / "run"
    file.write_text(json.dumps(recipe(tiny_root, run, "zero2", run={"max_steps": 5, "save_every": 5})))
    done = subprocess.run(
        [*TOOLKIT, "import-checkpoint", source, file], capture_output=True, text=True, timeout=120, check=True
    )
    command = next(line for line in done.stdout.splitlines() if line.startswith("next: ")).split()[2:]
    done = subprocess.run([*TOOLKIT, *command], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert f"resumed from {run}/checkpoints/step-00000003" in done.stdout
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == [4, 5]
    assert newest(run / "checkpoints") == run / "checkpoints" / "step-00000005"


@pytest.mark.usefixtures("launches")
def test_no_room_leaves_nothing(written: Written, tiny_root: Path, tmp_path: Path) -> None:
    source, run = written("plain", vocab=VOCAB), tmp_path / "run"
    values = recipe(tiny_root, run)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(RunFailed, match=r"step-00000003: cannot be written: .*File too large.*; free space there"):
            imported(source, values)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not run.exists()
    assert imported(source, values).step == 3, "with room it is imported"


_BUSY = """
import sys, time
from pathlib import Path
from toolkit.launch.output import claim_folder
from toolkit.recipe.load import load_recipe
from toolkit.strategies import resolve
claim_folder(resolve(load_recipe(sys.argv[1], []), sys.argv[1], device="cpu"), resume=False)
print("claimed", flush=True)
time.sleep(60)
"""


@pytest.mark.usefixtures("launches")
def test_only_an_unused_folder_is_taken(written: Written, tiny_root: Path, tmp_path: Path) -> None:
    source, file = written("plain", vocab=VOCAB), tmp_path / "recipe.json"
    other, used = tmp_path / "other", tmp_path / "used"
    other.mkdir()
    (other / "thesis.tex").write_text("")
    with pytest.raises(InputError, match="contains other files; set an empty or a new folder"):
        imported(source, recipe(tiny_root, other))
    assert [path.name for path in other.iterdir()] == ["thesis.tex"]

    values = recipe(tiny_root, used)
    file.write_text(json.dumps(values))
    with subprocess.Popen([*TOOLKIT[:1], "-c", _BUSY, file], stdout=subprocess.PIPE, text=True) as job:
        try:
            assert job.stdout is not None
            assert job.stdout.readline() == "claimed\n"
            with pytest.raises(InputError, match="directory in use by a running job"):
                imported(source, values)
        finally:
            job.kill()
    assert imported(source, values).step == 3, "the other process has ended"


@pytest.mark.usefixtures("launches")
def test_a_notebook_gives_the_folder_back(tiny_root: Path, tmp_path: Path) -> None:
    """Another process may resume in a folder that this one has finished with."""
    values = recipe(tiny_root, tmp_path / "run")
    (file := tmp_path / "recipe.json").write_text(json.dumps(values))
    claim_folder(resolved_from(values), resume=False)
    again = [*TOOLKIT[:1], "-c", _BUSY.replace("sleep(60)", "sleep(0)"), str(file)]
    refused = subprocess.run(again, capture_output=True, text=True, timeout=60, check=False)
    assert "directory in use by a running job" in refused.stderr
    release_folder(tmp_path / "run")
    assert subprocess.run(again, capture_output=True, text=True, timeout=60, check=False).stdout == "claimed\n"
