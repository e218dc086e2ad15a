"""Accuracy, F1 and Pearson's correlation of held-out samples: by hand, over ranks, in files, and as ``run.metric``."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import every_case
from families import FAMILIES
from jobs import resolved_from
from tiny import WORDS, recipe_dict
from toolkit.data.loader import eval_batches, open_data
from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.recipe.resolve import Resolved
from toolkit.tasks import task_of
from toolkit.tasks.labels import IGNORED, number_bits
from toolkit.training import finding
from toolkit.training.loop import evaluate
from toolkit.training.run import run
from toolkit.training.scores import Classes, Counting, Evaluated, Numbers
from toolkit.training.session import open_session


def alone(tensor: torch.Tensor) -> torch.Tensor:
    """What one process adds up."""
    return tensor


def test_accuracy_and_f1_are_those_of_their_definitions() -> None:
    counting = Counting(task_of("token-classification"))
    labels = [0, 0, 1, 2, IGNORED, 2]
    told = [0, 1, 1, 2, 3, 0]
    logits = torch.nn.functional.one_hot(torch.tensor(told), 5).float()
    counting.add(logits[:2], torch.tensor(labels[:2]), [])
    counting.add(logits[2:], torch.tensor(labels[2:]), [])
    values = counting.total(alone, torch.device("cpu")).values(["a", "b", "c"])
    assert values["accuracy"] == 3 / 5
    # a: 1 right of 2 labels and 2 predictions; b: 1 of 1 and 2; c: 1 of 2 and 1. The other classes do not occur.
    assert values["f1_by_label"] == {"a": 2 / 4, "b": 2 / 3, "c": 2 / 3}
    assert values["f1"] == pytest.approx((1 / 2 + 2 / 3 + 2 / 3) / 3)
    nothing = Classes(torch.zeros((3, 2), dtype=torch.float64)).values(None)
    assert nothing == {"accuracy": None, "f1": None, "f1_by_label": {}}


def test_a_class_that_is_predicted_and_never_a_label_counts_as_zero() -> None:
    counting = Counting(task_of("sequence-classification"))
    counting.add(torch.tensor([[0.0, 1.0], [0.0, 1.0]]), torch.tensor([0, 1]), [0, 1])
    assert counting.total(alone, torch.device("cpu")).values(None)["f1_by_label"] == {"0": 0.0, "1": 2 / 3}


def test_pearsons_correlation_is_its_definition_in_any_order_and_beside_a_large_mean() -> None:
    draw = random.Random(0)
    labels = [1e4 + draw.gauss(0, 1) for _ in range(50)]
    told = [one + draw.gauss(0, 0.5) for one in labels]
    exact = [torch.tensor(each, dtype=torch.float32).double().tolist() for each in (told, labels)]
    found = []
    for seed in range(3):
        order = random.Random(seed).sample(range(50), 50)
        counting = Counting(task_of("sequence-regression"))
        for start in range(0, 50, 7):
            ids = order[start : start + 7]
            bits = [number_bits(labels[at]) for at in ids] + [IGNORED]
            logits = torch.tensor([[told[at]] for at in ids] + [[7.0]])
            counting.add(logits, torch.tensor(bits), ids)  # the last row is no sample
        found.append(counting.total(alone, torch.device("cpu")).values(None)["pearson"])
    assert len(set(found)) == 1
    assert found[0] == pytest.approx(statistics.correlation(*exact), abs=1e-12)
    equal = Numbers(torch.ones(3, dtype=torch.float64), torch.arange(3, dtype=torch.float64))
    assert equal.values(None) == {"pearson": None}


def test_several_held_out_sets_add_up_to_one() -> None:
    first = Evaluated(1.0, 2, Classes(torch.tensor([[2.0, 0.0], [1.0, 1.0], [1.0, 0.0]])))
    second = Evaluated(4.0, 1, Classes(torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.0, 1.0]])))
    both = (first + second).values(task_of("sequence-classification"), None)
    assert (both["loss"], both["tokens"], both["accuracy"]) == (2.0, 3, 2 / 3)
    assert Evaluated(math.nan, 3).values(task_of("causal-lm"), None) == {"loss": None, "tokens": 3}


def samples(folder: Path, name: str, task: str, count: int, seed: int) -> str:
    """Texts whose first word decides their class or number."""
    draw = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for _ in range(count):
        words = draw.choices(WORDS[:3], k=draw.randint(2, 9))
        kinds = [WORDS.index(word) for word in words]
        if task == "token-classification":
            rows.append({"tokens": words, "labels": [f"c{kind}" for kind in kinds]})
        elif task == "sequence-regression":
            rows.append({"text": " ".join(words), "label": 2.0 * kinds[0] + 100})
        else:
            rows.append({"text": " ".join(words), "label": f"c{kinds[0]}"})
    file = folder / f"{task}-{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def recipe_of(task: str, root: Path, folder: Path, **sections: Any) -> dict[str, Any]:
    form = {"token-classification": "tokens"}.get(task, "text")
    data = {
        "train": samples(folder, "train", task, 24, 0),
        "eval": samples(folder, "eval", task, 13, 1),
        "format": form,
    }
    model = FAMILIES["bert"] | {"task": task, "num_labels": None if task == "sequence-regression" else 3}
    data |= sections.pop("data", {})
    return recipe_dict(root, model=model, data=data, **sections)


TASKS = ("sequence-classification", "token-classification", "sequence-regression")


def evaluation_job(resolved: Resolved) -> dict[str, Any]:
    session = open_session(resolved)
    held_out = open_data(session.data_recipe, "eval", session.tokenizer)
    batches = eval_batches(held_out, resolved.recipe, resolved.micro_size, resolved.data_size, session.data_rank, "cpu")
    return evaluate(session, batches).values(task_of(resolved.recipe.model.task), held_out.label_names)


@pytest.mark.parametrize(
    "strategy", ["ddp", *(pytest.param(one, marks=pytest.mark.nightly) for one in ("zero3", "fsdp1", "fsdp2"))]
)
def test_scores_are_exact_over_ranks(strategy: str, tiny_root: Path, tmp_path: Path, group: WorkerGroup) -> None:
    for task in TASKS:
        recipe = recipe_of(task, tiny_root, tmp_path, batch={"micro_size": 3}, strategy={"name": strategy})
        found = group.run(evaluation_job, resolved_from(recipe))
        assert found[0] == found[1]
        one = recipe | {"strategy": {"name": "single"}, "machine": {"device": "cpu", "processes": 1}}
        right = evaluation_job(resolved_from(one))
        assert found[0].keys() == right.keys()
        for key in ("tokens", "accuracy", "f1", "f1_by_label"):
            assert found[0].get(key) == right.get(key), (task, key)
        for key in ("loss", "pearson"):
            assert key not in right or found[0][key] == pytest.approx(right[key], rel=1e-5), (task, key)


def lines(file: Path) -> Iterator[dict[str, Any]]:
    yield from (json.loads(line) for line in file.read_text().splitlines())


def test_a_run_writes_scores_and_the_metric_chooses_the_best_checkpoint(tiny_root: Path, tmp_path: Path) -> None:
    sets = {name: samples(tmp_path, name, TASKS[0], count, count) for name, count in (("near", 9), ("far", 5))}
    recipe = recipe_of(
        "sequence-classification", tiny_root, tmp_path, data={"eval": sets},
        strategy={"name": "single"}, machine={"processes": 1}, optimizer={"lr": 0.03},
        run={"max_steps": 6, "eval_every": 1, "save_every": 1, "keep": 6, "eval_at_start": True, "metric": "near.f1",
             "output_dir": str(tmp_path / "run")},
    )  # fmt: skip
    (tmp_path / "run").mkdir()
    answer = run(resolved_from(recipe), resume=False, screen=None)
    found = [*lines(tmp_path / "run/eval.jsonl")]
    assert [line["step"] for line in found] == [step for step in range(7) for _ in range(3)]
    assert [line.get("eval_set") for line in found[:3]] == ["near", "far", None]
    for near, far, whole in zip(*(iter(found),) * 3, strict=True):
        assert whole["tokens"] == near["tokens"] + far["tokens"] == 14
        assert whole["loss"] == pytest.approx((9 * near["loss"] + 5 * far["loss"]) / 14)
        assert whole["accuracy"] == pytest.approx((9 * near["accuracy"] + 5 * far["accuracy"]) / 14)
        assert set(near["f1_by_label"]) <= {"c0", "c1", "c2"}
    scores: dict[int, float] = {
        line["step"]: line["f1"] for line in found if line.get("eval_set") == "near" and line["step"]
    }
    best = max(scores, key=lambda step: (scores[step], -step))
    assert len(set(scores.values())) > 1, "nothing to choose between"
    assert finding.best(tmp_path / "run/checkpoints") == tmp_path / f"run/checkpoints/step-{best:08d}"
    assert answer["best_checkpoint"].endswith(f"step-{best:08d}")
    assert answer["evaluation"] == found[-1]
    assert answer["eval_loss"] == found[-1]["loss"]


@every_case(
    ("task", "metric", "data", "message"),
    [
        ("causal-lm", "f1", {}, "run.metric: f1 is not measured for causal-lm; set eval_loss"),
        ("sequence-regression", "accuracy", {}, "run.metric: accuracy is not measured for sequence-regression; set "
         "eval_loss or pearson"),
        ("sequence-classification", "news.f1", {}, "run.metric: news.f1: there is no held-out set news"),
        ("sequence-classification", "f1", {"eval": None}, "run.metric: needs evaluations, but no data is held out"),
    ],
)  # fmt: skip
def test_a_metric_that_is_not_measured_is_refused(
    task: str, metric: str, data: dict[str, Any], message: str, tiny_root: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(task, tiny_root, tmp_path, data=data, run={"metric": metric, "eval_every": None})
    with pytest.raises(InputError) as caught:
        resolved_from(recipe)
    assert message in str(caught.value)


def losses_job(resolved: Resolved) -> list[float]:
    destroy = torch.distributed.destroy_process_group
    torch.distributed.destroy_process_group = lambda *_: None  # the group is the tests'
    try:
        run(resolved, resume=False, screen=None)
    finally:
        torch.distributed.destroy_process_group = destroy
    return [line["loss"] for line in lines(Path(resolved.recipe.run.output_dir) / "metrics.jsonl")]


@pytest.mark.parametrize(
    "strategy",
    ["ddp", *(pytest.param(one, marks=pytest.mark.nightly) for one in ("zero1", "zero2", "zero3", "fsdp1", "fsdp2"))],
)
def test_an_evaluation_before_the_first_step_changes_no_step(
    strategy: str, tiny_root: Path, tmp_path: Path, group: WorkerGroup
) -> None:
    found = []
    for at_start in (False, True):
        folder = tmp_path / str(at_start)
        folder.mkdir()
        recipe = recipe_dict(
            tiny_root, strategy={"name": strategy}, data={"eval_fraction": 0.2},
            run={"output_dir": str(folder), "eval_every": 3, "eval_at_start": at_start},
        )  # fmt: skip
        found.append(group.run(losses_job, resolved_from(recipe))[0])
        steps = [line["step"] for line in lines(folder / "eval.jsonl")]
        assert steps == [0, 3, 4][0 if at_start else 1 :]
    assert found[0] == found[1]


def test_a_stream_has_the_scores_of_the_same_rows(tiny_root: Path, tmp_path: Path, group: WorkerGroup) -> None:
    recipe = recipe_of("sequence-regression", tiny_root, tmp_path, batch={"micro_size": 3})
    found = []
    for streaming in (False, True):
        data = recipe["data"] | {"streaming": streaming}
        found.append(group.run(evaluation_job, resolved_from(recipe | {"data": data}))[0])
    assert found[0] == found[1]
    assert found[0]["tokens"] == 13
