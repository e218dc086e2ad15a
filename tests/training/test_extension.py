"""What may change when a run is resumed: its length where the schedule allows it, and what docs/training.md lists."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs import resolved_from
from signalled import metrics, steps
from tiny import recipe_dict
from toolkit.errors import InputError
from toolkit.launch.command import TrainOptions
from toolkit.launch.identity import FREE, check_recipe
from toolkit.launch.job import train as launch
from toolkit.recipe.schema import Recipe
from toolkit.rooms import all_options
from toolkit.threads import torch_threads
from toolkit.training import finding
from toolkit.training.manifest import read_manifest
from toolkit.training.rank import main as job
from toolkit.training.run import run

PAGE = Path(__file__).parents[2] / "docs" / "training.md"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are slower on more."""
    with torch_threads(1):
        yield


def recipe(root: Path, folder: Path, *, schedule: str = "cosine", **sections: Any) -> dict[str, Any]:
    length = {"max_steps": 4, "output_dir": str(folder), "save_every": 4, "keep": 9} | sections.pop("run", {})
    return recipe_dict(
        root,
        strategy={"name": "single"},
        machine={"processes": 1},
        batch={"accumulation": 1, "micro_size": 10},  # three steps an epoch
        schedule={"name": schedule, "warmup_steps": 2} | sections.pop("warmup", {}),
        run=length,
        **sections,
    )


def train(values: dict[str, Any], tmp_path: Path, *, resume: bool = True, extend: bool = False) -> str:
    """Train; returns what the screen showed."""
    Path(values["run"]["output_dir"]).mkdir(exist_ok=True)
    with (tmp_path / "screen").open("w+", encoding="utf-8") as screen:
        run(resolved_from(values), resume=resume, extend=extend, screen=screen)
        screen.seek(0)
        return screen.read()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    newest = finding.newest(folder / "checkpoints")
    assert newest is not None
    return dict(finding.tensors_of(newest))


def same(first: Path, second: Path) -> bool:
    a, b = weights(first), weights(second)
    return steps(first) == steps(second) and all(torch.equal(a[name], b[name]) for name in a)


LONGER = {"max_steps": 7}


@pytest.mark.parametrize(
    ("short", "long"), [({}, LONGER), ({"max_steps": None, "epochs": 1}, {"max_steps": None, "epochs": 2})]
)
def test_where_the_schedule_stays_a_longer_run_is_the_uninterrupted_one(
    short: dict[str, Any], long: dict[str, Any], tiny_root: Path, tmp_path: Path
) -> None:
    one, whole = tmp_path / "one", tmp_path / "whole"
    train(recipe(tiny_root, one, schedule="constant", run=short), tmp_path, resume=False)
    taken = metrics(one)[-1]["step"]
    shown = train(recipe(tiny_root, one, schedule="constant", run=long), tmp_path)
    total = metrics(one)[-1]["step"]
    assert total > taken
    assert f"extended from {taken} to {total} steps: the learning rates of the completed steps are the same" in shown
    train(recipe(tiny_root, whole, schedule="constant", run=long), tmp_path, resume=False)
    assert same(one, whole)
    assert read_manifest(one / "checkpoints" / f"step-{total:08d}")["extensions"] == []


def test_the_same_length_in_other_words_is_no_change(tiny_root: Path, tmp_path: Path) -> None:
    train(recipe(tiny_root, tmp_path / "run", run={"max_steps": 3}), tmp_path, resume=False)
    shown = train(recipe(tiny_root, tmp_path / "run", run={"max_steps": None, "epochs": 1}), tmp_path)
    assert "extended from" not in shown


def test_where_the_schedule_changes_it_asks(tiny_root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(recipe(tiny_root, folder, run={"max_steps": 6, "save_every": 4}), tmp_path, resume=False)
    (folder / "checkpoints" / "step-00000006" / "manifest.json").unlink()
    before = metrics(folder)
    longer = recipe(tiny_root, folder, run={"max_steps": 9})
    with pytest.raises(InputError) as refused:
        train(longer, tmp_path)
    assert metrics(folder) == before, "a refusal leaves the run as it was"
    message = str(refused.value)
    assert message.startswith(
        f"recipe.yaml: run.max_steps: 9: 6 steps in {folder}/checkpoints/step-00000004, 9 in this recipe"
    )
    # Half a cosine from update 2 to the end, 4 updates there and 7 here: 0.5 (1 + cos(pi (update - 2) / 4 or 7)).
    rows = {line.split()[0]: line.split()[1:] for line in refused.value.problems[2:-1]}
    assert rows == {"4": ["(completed)", "0.0008536", "0.0009505"], "5": ["0.0005", "0.0008117"],
                    "6": ["0.0001464", "0.0006113"], "9": ["-", "4.952e-05"]}  # fmt: skip
    assert "Add --extend to continue from step 5" in message
    shown = train(longer, tmp_path, extend=True)
    assert "extended from 6 to 9 steps; learning rates: step 5: 0.0008117; " in shown
    assert "step 6: 0.0006113; step 9: 4.952e-05 (before: step 5: 0.0005)" in shown
    rates = {line["step"]: line["lr"] for line in metrics(folder)}
    assert rates[4] == pytest.approx(0.0008536, rel=1e-4)
    assert rates[5] == pytest.approx(0.0008117, rel=1e-4)
    assert rates[9] == pytest.approx(4.952e-05, rel=1e-4)


def test_an_extended_run_is_resumed_without_being_asked_again(tiny_root: Path, tmp_path: Path) -> None:
    folder, longer = tmp_path / "run", {"max_steps": 8, "save_every": 2}
    train(recipe(tiny_root, folder, run={"max_steps": 5, "save_every": 5}), tmp_path, resume=False)
    train(recipe(tiny_root, folder, run=longer), tmp_path, extend=True)
    whole = steps(folder)
    noted = [{"step": 5, "from_steps": 5, "to_steps": 8}]
    assert read_manifest(folder / "checkpoints" / "step-00000008")["extensions"] == noted
    (folder / "checkpoints" / "step-00000008" / "manifest.json").unlink()
    for extend in (False, True):  # an automatic restart has the first start's arguments
        shown = train(recipe(tiny_root, folder, run=longer), tmp_path, extend=extend)
        assert "resumed from" in shown
        assert "extended from" not in shown
        assert steps(folder) == whole
        assert read_manifest(folder / "checkpoints" / "step-00000008")["extensions"] == noted


def test_a_shorter_run_has_the_same_rule(tiny_root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(recipe(tiny_root, folder, schedule="linear", run={"max_steps": 9, "save_every": 4}), tmp_path, resume=False)
    for step in (8, 9):
        (folder / "checkpoints" / f"step-{step:08d}" / "manifest.json").unlink()
    with pytest.raises(InputError, match=r"run\.max_steps: 2: .* is already at step 4, but this recipe has 2"):
        train(recipe(tiny_root, folder, schedule="linear", run={"max_steps": 2}), tmp_path, extend=True)
    shorter = recipe(tiny_root, folder, schedule="linear", run={"max_steps": 5})
    with pytest.raises(InputError, match=r"Add --extend .* or set run\.max_steps: 9"):
        train(shorter, tmp_path)
    shown = train(shorter, tmp_path, extend=True)
    assert "shortened from 9 to 5 steps; learning rates: step 5: 0.0003333 (before: step 5: 0.0007143)" in shown
    assert metrics(folder)[-1]["step"] == 5


def test_a_share_of_warm_up_moves_with_the_length(tiny_root: Path, tmp_path: Path) -> None:
    """Constant after its warm-up, but the warm-up is a share of the steps: steps that were taken change."""
    warmup = {"warmup_steps": None, "warmup_ratio": 0.5}
    train(recipe(tiny_root, tmp_path / "run", schedule="constant", warmup=warmup), tmp_path, resume=False)
    with pytest.raises(InputError, match=r"4 \(completed\) +0\.001 +0\.00075\n"):
        train(recipe(tiny_root, tmp_path / "run", schedule="constant", warmup=warmup, run={"max_steps": 8}), tmp_path)


def test_extend_goes_with_resume(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match=r"--extend: requires --resume"):
        launch(TrainOptions("recipe.yaml", extend=True))
    assert job(["recipe.yaml", "--extend"]) == 2
    assert "--extend: " in capsys.readouterr().err


# ---------------------------------------------------------------------- what else may change


def test_another_loss_of_the_same_mathematics_goes_on_with_a_note(tiny_root: Path, tmp_path: Path) -> None:
    """As after a run that had no memory for its logits. It equals the run that never changed, within rounding."""
    one, whole = tmp_path / "one", tmp_path / "whole"
    train(recipe(tiny_root, one, schedule="constant"), tmp_path, resume=False)
    longer = {"schedule": "constant", "run": LONGER}
    shown = train(recipe(tiny_root, one, loss="fused", **longer), tmp_path)
    note = "loss: fused in place of plain: the same mathematics in another order"
    assert f"note: {note}" in shown
    assert any(line.startswith(note) for line in json.loads((one / "result.json").read_text())["notes"])
    train(recipe(tiny_root, whole, **longer), tmp_path, resume=False)
    a, b = weights(one), weights(whole)
    assert all(torch.allclose(a[name], b[name], rtol=1e-4, atol=1e-6) for name in b)
    assert "in place of" not in train(recipe(tiny_root, one, loss="fused", **longer), tmp_path)


def in_the_docs() -> set[str]:
    section = PAGE.read_text(encoding="utf-8").split("## What may change on resume")[1].split("\n## ")[0]
    table = "\n".join(line.split("|")[1] for line in section.splitlines() if line.startswith("| `"))
    return set(re.findall(r"`([a-z_.]+)`", table))


def free_keys() -> set[str]:
    free = FREE | {option.key: None for option in all_options().values() if option.free}
    return {name for section, keys in free.items() for name in ([section] if keys is None else _in(section, keys))}


def _in(section: str, keys: set[str]) -> list[str]:
    return [f"{section}.{key}" for key in keys]


def test_the_docs_list_what_may_change() -> None:
    assert in_the_docs() == free_keys()
    sections = Recipe.model_fields
    for key in free_keys():
        section, _, name = key.partition(".")
        assert section in sections
        assert not name or name in sections[section].annotation.model_fields, key  # type: ignore[union-attr]


FIRST: dict[str, list[Any]] = {
    "strategy": [{"name": "single"}, {"name": "fsdp2", "reshard_after_forward": False}],
    "machine": [{"device": "cpu"}, {"device": "cpu", "processes": 2}],
    "activation_checkpointing": ["none", "full"], "activation_offload": [False, True], "compile": [False, True],
    "loss": ["plain", "fused"],
    "run.output_dir": ["a", "b"], "run.log_every": [1, 5], "run.save_every": [0, 2], "run.keep": [2, 3],
    "run.eval_every": [0, 2], "run.trackers": [[], ["tensorboard"]], "run.on_bad_loss": ["stop", "skip"],
    "run.loss_spike": [None, 3.0], "run.hang_after": [40, 0], "run.async_save": [True, False],
    "run.early_stopping": [None, {"patience": 2}], "run.eval_at_start": [False, True],
    "run.metric": ["eval_loss", "news.eval_loss"], "run.group_norms": [False, True],
    "run.sample_prompts": [[], ["a"]], "run.sample_max_new_tokens": [64, 8],
    "data.workers": [0, 2], "data.eval": [None, "eval.jsonl"], "data.cache": [None, False],
    "batch.micro_size": [2, 4], "batch.accumulation": [2, 1], "batch.global_size": [None, 4],
}  # fmt: skip
"""Two values of everything that may change; all of the batch's together are the same global batch of four."""


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with a recipe of the first values, as a checkpoint holds it."""
    (tmp_path / "recipe.json").write_text(json.dumps(values_of(0).model_dump(mode="json")))
    return tmp_path


def values_of(index: int) -> Recipe:
    values = recipe_dict(Path("data"), batch={"micro_size": 2, "accumulation": 2}, machine={"processes": 1})
    for key, choices in FIRST.items():
        section, _, name = key.partition(".")
        if name:
            values[section] = values[section] | {name: choices[index]}
        else:
            values[section] = choices[index]
    if index:
        values["machine"]["processes"] = 1
    return Recipe.model_validate(values)


def test_all_that_is_listed_may_change(saved: Path) -> None:
    assert FIRST.keys() == free_keys()
    check_recipe(saved, {}, values_of(1), "r.yaml")


def test_what_may_not_change_is_named_with_what_to_do(saved: Path) -> None:
    other = values_of(0).model_dump(mode="json")
    other["optimizer"]["lr"], other["run"]["seed"], other["batch"]["accumulation"] = 0.5, 4, 8
    with pytest.raises(InputError) as refused:
        check_recipe(saved, {}, Recipe.model_validate(other), "r.yaml")
    assert refused.value.problems[:3] == (
        "r.yaml: optimizer.lr (checkpoint: 0.001, recipe: 0.5)",
        "r.yaml: run.seed (checkpoint: 3, recipe: 4)",
        "r.yaml: batch.micro_size x batch.accumulation x processes (checkpoint: 4, recipe: 16)",
    )
    assert str(saved) in refused.value.problems[3]
    assert "Restore them to resume it, or start a new run in another run.output_dir" in refused.value.problems[3]
