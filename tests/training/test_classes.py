"""The names of classes reach the exported model; more classes than the model has are an error before training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from cases import every_case
from families import FAMILIES
from jobs import resolved_from
from tiny import recipe_dict
from toolkit.checkpoint_export.command import Request, export_command
from toolkit.data.loader import open_data
from toolkit.errors import InputError
from toolkit.training import checkpoint
from toolkit.training.loop import Progress
from toolkit.training.session import Session, open_session

LABELS = ["O", "B-PER", "I-PER"]


@pytest.fixture
def session(tiny_root: Path, tmp_path: Path) -> Callable[..., Session]:
    """A run of one process on three classes of words, or of texts."""
    words = [{"tokens": ["the", "model", "rank"], "labels": LABELS}]
    texts = [{"text": "the model", "label": label} for label in LABELS]

    def make(task: str, classes: int | None, adapter: dict[str, Any] | None = None) -> Session:
        tokens = task == "token-classification"
        file = tmp_path / f"{task}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in (words if tokens else texts)))
        recipe = recipe_dict(
            tiny_root,
            model=FAMILIES["bert"] | {"task": task, "num_labels": classes},
            data={"train": str(file), "format": "tokens" if tokens else "text"},
            strategy={"name": "single"},
            machine={"processes": 1},
            adapter=adapter,
        )
        return open_session(resolved_from(recipe))

    return make


@every_case("task", ["token-classification", "sequence-classification"])
def test_names_of_classes_are_exported(task: str, session: Callable[..., Session], tmp_path: Path) -> None:
    run = session(task, 4)
    samples = open_data(run.data_recipe, "train", run.tokenizer)
    run.label_names = samples.label_names
    checkpoint.save(run, tmp_path / "run" / "checkpoints", Progress(1, 1))
    export_command(Request(str(tmp_path / "run"), str(tmp_path / "out")))
    config = AutoConfig.from_pretrained(tmp_path / "out")
    # The model has a class more than the data: its name stays transformers' own.
    assert config.id2label == {0: "B-PER", 1: "I-PER", 2: "O", 3: "LABEL_3"}
    assert config.label2id["O"] == 2


def test_a_card_names_the_classes_of_an_adapter(session: Callable[..., Session], tmp_path: Path) -> None:
    run = session("token-classification", 3, {"r": 2})
    run.label_names = ["B-PER", "I-PER", "O"]
    checkpoint.save(run, tmp_path / "run" / "checkpoints", Progress(1, 1))
    export_command(Request(str(tmp_path / "run"), str(tmp_path / "out")))
    assert "| classes | B-PER, I-PER, O |" in (tmp_path / "out/README.md").read_text()


@every_case("task", ["token-classification", "sequence-classification"])
def test_more_classes_than_the_model_has(task: str, session: Callable[..., Session]) -> None:
    run = session(task, None)  # transformers' default: two
    with pytest.raises(InputError) as error:
        open_data(run.data_recipe, "train", run.tokenizer)
    assert str(error.value) == (
        "model.num_labels: the model has 2 classes, and data.train has 3 labels (B-PER, I-PER, O); set it to 3"
    )


def test_a_number_beyond_the_models_classes(session: Callable[..., Session], tmp_path: Path) -> None:
    run = session("sequence-classification", None)
    (tmp_path / "sequence-classification.jsonl").write_text('{"text": "the", "label": 2}\n')
    with pytest.raises(InputError, match="2 is not a class; classes are the integers from 0 to 1"):
        open_data(run.data_recipe, "train", run.tokenizer)
