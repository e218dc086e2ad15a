"""Pages that nobody named: every recipe, strategy and set of overrides has its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.report.names import page_name


def test_presets_do_not_overwrite_one_another() -> None:
    presets = sorted((Path(__file__).parents[2] / "ds_configs").glob("*/recipe.yaml"))
    assert len(presets) > 3
    names = [page_name(str(file), "zero2") for file in presets]
    assert len(set(names)) == len(names)
    assert page_name("ds_configs/zero2-lora/recipe.yaml", "zero2") == "zero2-lora-zero2"


def test_strategies_and_overrides_have_pages_of_their_own() -> None:
    calls = [[], ["strategy.name=zero1"], ["batch.accumulation=3"], ["data.train=a/b.jsonl", "adapter={r: 8}"]]
    names = [page_name("my.yaml", "zero1" if call[:1] == ["strategy.name=zero1"] else "zero2", call) for call in calls]
    assert names == [
        "my-zero2", "my-zero1", "my-zero2-batch.accumulation-3", "my-zero2-data.train-a-b.jsonl-adapter-r-8",
    ]  # fmt: skip


def test_long_names_stay_apart() -> None:
    long = ["data.train=" + "x" * 200, "data.train=" + "x" * 199 + "y"]
    names = {page_name("my.yaml", "ddp", [word]) for word in long}
    assert len(names) == 2
    assert all(len(name) <= 80 for name in names)


def test_a_recipe_without_a_folder_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert page_name("recipe.yaml", "single") == f"{tmp_path.name}-single"
