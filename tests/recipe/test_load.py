"""Every mistake is reported with its file, line and key, all of a file's at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from cases import every_case
from tiny import recipe_dict
from toolkit.command_line import name_overrides
from toolkit.errors import InputError
from toolkit.launch.command import TrainOptions
from toolkit.launch.job import train
from toolkit.model.processor import load_tokenizer
from toolkit.recipe.load import load_recipe, recipe_sha256
from toolkit.recipe.schema import Recipe
from toolkit.verification.run import resolve_recipe

GOOD = """\
model: {path: some/model}
data:
  train: train.jsonl
optimizer:
  lr: 1e-4
run: {max_steps: 3}
"""


def load(tmp_path: Path, text: str, *overrides: str) -> str:
    file = tmp_path / "r.yaml"
    file.write_text(text)
    with pytest.raises(InputError) as caught:
        load_recipe(file, overrides)
    return str(caught.value).replace(str(tmp_path) + "/", "")


def test_numbers_are_yaml_1_2(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(GOOD)
    assert load_recipe(tmp_path / "r.yaml").optimizer.lr == 1e-4  # YAML 1.1 reads a string


@every_case(
    ("text", "expected"),
    [
        (GOOD + "optimiser: {lr: 1}\n", "r.yaml:7:1: optimiser: unknown key; did you mean optimizer?"),
        (GOOD.replace("  lr:", "  weight_decya: 0\n  lr:"), "r.yaml:5:3: optimizer.weight_decya: unknown key"),
        (GOOD.replace("1e-4", "fast"), "r.yaml:5:3: optimizer.lr: input should be a valid number (given: 'fast')"),
        (GOOD.replace("max_steps: 3", "max_steps: 0"), "r.yaml:6:7: run.max_steps: input should be greater than"),
        (GOOD.replace("max_steps: 3", "max_steps: true"), "r.yaml:6:7: run.max_steps: input should be a valid int"),
        (GOOD + "precision: bf15\n", "did you mean bf16?"),
        (GOOD.replace("{path: some/model}", "{}"), "r.yaml:1:1: model: set exactly one of `path` and `config`"),
        (GOOD.replace("  train: train.jsonl", "  eval: e.jsonl"), "r.yaml:2:1: data.train: missing"),
        (GOOD + "data: {train: x}\n", "r.yaml:7:1: data: duplicate key; the first is in line 2"),
        (GOOD.replace("model: {", "model: {{"), "not valid YAML"),
        ("- a\n- b\n", "expected a mapping with the sections"),
        ("", "expected a mapping with the sections"),
        (GOOD.replace("max_steps: 3", "max_steps: 3, epochs: 1"), "run: set only one of `max_steps` and `epochs`"),
    ],
)
def test_mistakes_are_placed(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in load(tmp_path, text)


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    lines = load(tmp_path, GOOD.replace("1e-4", "fast") + "precision: bf15\nfoo: 1\n").splitlines()
    assert len(lines) == 3


def test_an_override_wins_and_its_mistakes_are_its_own(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(GOOD)
    recipe = load_recipe(tmp_path / "r.yaml", ["optimizer.lr=0.5", "adapter.r=4", "strategy.name=zero3"])
    assert (recipe.optimizer.lr, recipe.adapter and recipe.adapter.r, recipe.strategy.name) == (0.5, 4, "zero3")
    assert load(tmp_path, GOOD, "optimizer.lr=x").startswith("override optimizer.lr=x: optimizer.lr: input should")
    assert "an override has the form section.key=value" in load(tmp_path, GOOD, "nonsense")


@every_case(
    ("problem", "expected"),
    [
        ("r.yaml: strategy.name: single runs", "command line: strategy.name=single: strategy.name: single runs"),
        ("r.yaml: adapter.r: too large", "command line: adapter={r: 4}: adapter.r: too large"),
        ("r.yaml: batch: global_size is 3", "command line: batch.global_size=3: batch: global_size is 3"),
        ("strategy.name: without a file", "command line: strategy.name=single: strategy.name: without a file"),
        ("run.seed: without a file", "run.seed: without a file"),
        ("r.yaml: batch: other", "r.yaml: batch: other"),
        ("r.yaml: run.seed: other", "r.yaml: run.seed: other"),
        ("override optimzer.lr=1: optimzer: unknown", "command line: optimzer.lr=1: optimzer: unknown"),
        ("r.yaml:4:1: strategy.name: other", "r.yaml:4:1: strategy.name: other"),
    ],
)
def test_errors_of_the_command_line_name_the_command_line(problem: str, expected: str) -> None:
    overrides = ["strategy.name=single", "adapter={r: 4}", "batch.global_size=3", "optimzer.lr=1"]
    arguments = ["train", "r.yaml", *overrides]
    assert name_overrides(f"{problem}\n  more", arguments) == f"{expected}\n  more"
    assert name_overrides(name_overrides(problem, arguments), arguments) == expected


def test_a_key_that_an_override_makes_is_placed_there(tmp_path: Path) -> None:
    said = load(tmp_path, GOOD, "optimzer.lr=1e-4", "strategy=fsdp2", "run.early_stopping=3", "model=gpt2").splitlines()
    section = "is a section, not a value (given:"
    assert sorted(said) == [
        f"override model=gpt2: model: {section} 'gpt2'); did you mean model.path?",
        "override optimzer.lr=1e-4: optimzer: unknown key; did you mean optimizer?",
        f"override run.early_stopping=3: run.early_stopping: {section} 3); did you mean run.early_stopping.patience?",
        f"override strategy=fsdp2: strategy: {section} 'fsdp2'); did you mean strategy.name?",
    ]


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        load_recipe(tmp_path / "absent.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00bad")
    with pytest.raises(InputError, match="not UTF-8"):
        load_recipe(tmp_path / "b.yaml")


def test_the_hash_is_of_the_meaning(tmp_path: Path) -> None:
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text(GOOD)
    second.write_text("# a comment\n" + GOOD.replace("1e-4", "0.0001") + "precision: fp32\n")
    assert recipe_sha256(load_recipe(first)) == recipe_sha256(load_recipe(second))
    assert recipe_sha256(load_recipe(first)) != recipe_sha256(load_recipe(first, ["run.seed=1"]))


def test_a_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    recipe = Recipe.model_validate(
        {
            "model": {"path": "~/llama"},
            "tokenizer": {"path": "~/words"},
            "adapter": {"path": "~/before"},
            "data": {"train": "a.jsonl"},
            "run": {"max_steps": 1, "output_dir": "~/runs/a"},
        }
    )
    assert recipe.adapter is not None
    found = recipe.model.path, recipe.tokenizer.path, recipe.adapter.path, recipe.run.output_dir
    assert found == ("/home/ada/llama", "/home/ada/words", "/home/ada/before", "/home/ada/runs/a")


@pytest.mark.parametrize("path", ["./not/there", "~/not/there", "/not/there", "not/there/"])
def test_a_tokenizer_that_is_nowhere_is_noticed_before_a_hub_is_asked(tiny_root: Path, path: str) -> None:
    recipe = Recipe.model_validate(recipe_dict(tiny_root, tokenizer={"path": path}))
    resolve_recipe(recipe, [])  # `verify` makes its own: the recipe may be for another machine
    for start in (lambda: train(TrainOptions(recipe)), lambda: load_tokenizer(recipe)):
        with pytest.raises(InputError, match=r"tokenizer\.path: no folder .*not/there"):
            start()
