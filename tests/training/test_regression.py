"""`model.task: sequence-regression`: numbers as labels, their loss, what is evaluated, and the exported model."""

from __future__ import annotations

import io
import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from cases import every_case
from families import FAMILIES
from jobs import resolved_from
from tiny import WORDS, recipe_dict
from toolkit.errors import InputError
from toolkit.recipe.load import load_recipe
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve
from toolkit.tasks.labels import IGNORED, number_bits, number_of
from toolkit.training.export import export
from toolkit.training.loss import squared_errors
from toolkit.training.run import run

BERT: dict[str, Any] = {"config": FAMILIES["bert"]["config"], "task": "sequence-regression"}
PAGE = Path(__file__).parents[2] / "docs/how-to/predict-a-number.md"


@every_case("number", [0.0, -0.0, 1.0, -100.0, 0.1, 3.4e38, -1.5e-45])
def test_a_label_is_the_number_in_float32(number: float) -> None:
    bits = number_bits(number)
    assert bits != IGNORED
    assert number_of(bits) == torch.tensor(number, dtype=torch.float32).item()
    read = torch.tensor([bits], dtype=torch.int64).to(torch.int32).view(torch.float32)
    assert read.item() == number_of(bits)
    assert math.isnan(number_of(IGNORED))


def test_samples_without_a_label_have_neither_loss_nor_gradient() -> None:
    logits = nn.Parameter(torch.tensor([[1.0], [2.0], [-3.0]]))
    loss = squared_errors(logits, torch.tensor([number_bits(-100.0), IGNORED, number_bits(-1.0)]))
    loss.backward()
    assert loss.item() == 101.0**2 + 4.0
    assert logits.grad is not None
    assert logits.grad.flatten().tolist() == [202.0, 0.0, -4.0]


def rated(file: Path, samples: int, seed: int) -> str:
    """Texts whose number follows from their first word, and a little noise."""
    draw, rows = random.Random(seed), []
    for _ in range(samples):
        words = draw.choices(WORDS[:4], k=draw.randint(3, 12))
        rows.append({"text": " ".join(words), "label": WORDS.index(words[0]) / 2 + draw.gauss(0, 0.01)})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def recipe(root: Path, folder: Path, **sections: Any) -> dict[str, Any]:
    train, held_out = (rated(folder / f"{name}.jsonl", n, n) for name, n in (("train", 96), ("held-out", 19)))
    values = recipe_dict(
        root,
        model=BERT,
        data={"train": train, "eval": held_out, "format": "text"},
        optimizer={"lr": 3.0e-3},
        batch={"micro_size": 8, "accumulation": 1},
        strategy={"name": "single"},
        machine={"processes": 1},
        run={"max_steps": 40, "eval_every": 10, "save_every": 40, "output_dir": str(folder / "run")},
    )
    return values | sections


def test_it_learns_evaluates_and_exports(tiny_root: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    (tmp_path / "run").mkdir()
    screen = io.StringIO()
    run(resolved_from(recipe(tiny_root, tmp_path)), resume=False, screen=screen)
    lines = [json.loads(line) for line in (tmp_path / "run/eval.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [10, 20, 30, 40]
    assert all(line["root_mean_squared_error"] == pytest.approx(line["loss"] ** 0.5) for line in lines)
    assert all(line["tokens"] == 19 for line in lines), "samples"
    rows = [json.loads(line) for line in (tmp_path / "held-out.jsonl").read_text().splitlines()]
    mean = sum(row["label"] for row in rows) / len(rows)
    assert lines[-1]["loss"] < 0.5 * sum((row["label"] - mean) ** 2 for row in rows) / len(rows), "better than the mean"
    assert "held-out mean squared error" in screen.getvalue()
    assert "over 19 samples" in screen.getvalue()
    assert re.search(r"done: .* samples · [\d,]+ tok/s", screen.getvalue())
    assert "held-out mean squared error" in screen.getvalue()
    assert lines[-1]["pearson"] > 0.7
    assert f"Pearson's r {lines[-1]['pearson']:.4f}" in screen.getvalue()

    export(tmp_path / "run", tmp_path / "model")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    assert (model.config.num_labels, model.config.problem_type) == (1, "regression")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    errors = []
    for row in rows:
        ids = tokenizer(row["text"])["input_ids"]
        ids = ids if ids[-1] == tokenizer.eos_token_id else [*ids, tokenizer.eos_token_id]
        with torch.no_grad():
            errors.append((model(torch.tensor([ids])).logits.item() - row["label"]) ** 2)
    assert sum(errors) / len(errors) == pytest.approx(lines[-1]["loss"], rel=1e-4)
    assert "| held-out mean squared error |" in (tmp_path / "model/README.md").read_text()


@every_case(
    ("sections", "message"),
    [
        ({"label_smoothing": 0.1}, r"label_smoothing: is defined for classes, and the labels of .* are numbers"),
        ({"z_loss": 1.0e-4}, r"z_loss: is a mean over tokens, but sequence-regression has one label per sample"),
        ({"loss": "fused"}, r"loss: .*requires model\.task: causal-lm"),
        (
            {"model": BERT | {"num_labels": 3}},
            r"model\.num_labels: sequence-regression has one number per sample, and 3 are set; remove it",
        ),
    ],
    ids=str,
)
def test_what_is_for_classes_is_refused(
    sections: dict[str, Any], message: str, tiny_root: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        resolved_from(recipe(tiny_root, tmp_path, **sections))


def test_the_example_of_the_page_is_a_recipe_of_this_task(tmp_path: Path) -> None:
    blocks = dict(re.findall(r"```\w+ title=\"([^\"]+)\"\n(.*?)```", PAGE.read_text(), re.DOTALL))
    for name, body in blocks.items():
        (tmp_path / name).write_text(body)
    assert all(isinstance(json.loads(line)["label"], int | float) for line in blocks["ratings.jsonl"].splitlines())
    given = load_recipe(tmp_path / "ratings.yaml")
    assert given.model.task == "sequence-regression"
    values = yaml.safe_load(blocks["ratings.yaml"])
    values["model"] = BERT
    values["tokenizer"] = {"path": "none"}
    assert resolve(Recipe.model_validate(values), "ratings.yaml", device="cpu").recipe.run.eval_every == 200
