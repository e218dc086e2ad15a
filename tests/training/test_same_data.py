"""A run resumes with the rows that it was made with: what is other is named, and asked for."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs import resolved_from
from tiny import recipe_dict
from toolkit.data.fingerprint import Fingerprint, change
from toolkit.errors import InputError
from toolkit.launch.identity import check_recipe, folder_prints
from toolkit.recipe.earlier import recipe_version
from toolkit.recipe.schema import Recipe
from toolkit.threads import torch_threads
from toolkit.training import finding
from toolkit.training.run import run

ROWS = [{"text": f"row {number}", "id": number} for number in range(200)]


def of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    found = Fingerprint()
    for row in rows:
        found.add(row, ("text",))
    return json.loads(json.dumps(found.to_json()))  # type: ignore[no-any-return]


def orders(rows: list[dict[str, Any]]) -> dict[int, str]:
    found, seen = Fingerprint(), {}
    for number, row in enumerate(rows, start=1):
        found.add(row, ("text",))
        seen[number] = found.at()
    return seen


def said(rows: list[dict[str, Any]]) -> str | None:
    return change(of(ROWS), of(rows), orders(rows))


def changed(at: int) -> list[dict[str, Any]]:
    return [row | ({"text": "other"} if number == at else {}) for number, row in enumerate(ROWS)]


def test_a_change_is_named() -> None:
    assert said(ROWS) is None
    assert said([row | {"id": 7} for row in ROWS]) is None  # a column that is not read
    assert said([*ROWS, *ROWS[:3]]) == "3 rows were added behind the 200 rows of before"
    mixed = list(ROWS)
    random.Random(0).shuffle(mixed)
    assert said(mixed) == "the same 200 rows are in another order"
    assert said(ROWS[:196]) == "the last 4 rows were removed, of 200"
    assert said(changed(150)) == "200 rows; the first that is other is row 149 to 152"
    assert said(changed(0)) == "200 rows; the first that is other is row 1 to 4"
    assert said([*ROWS[:50], {"text": "new"}, *ROWS[50:]]) == (
        "201 rows instead of 200; the first that is other is row 49 to 52"
    )
    assert said([*ROWS[:100], *ROWS[101:]]) == "199 rows instead of 200; the first that is other is row 101 to 104"


def test_a_fingerprint_of_many_rows_is_small() -> None:
    assert len(of(ROWS * 50)["marks"]) <= 64


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


def values(root: Path, tmp_path: Path, steps: int, **data: Any) -> dict[str, Any]:
    return recipe_dict(
        root,
        strategy={"name": "single"},
        machine={"processes": 1},
        batch={"accumulation": 1, "micro_size": 2},
        schedule={"name": "constant", "warmup_steps": 0},
        data=data,
        run={"max_steps": steps, "output_dir": str(tmp_path / "run"), "save_every": 1},
    )


def train(recipe: dict[str, Any], tmp_path: Path, **options: Any) -> str:
    Path(recipe["run"]["output_dir"]).mkdir(exist_ok=True)
    with (tmp_path / "screen").open("w+", encoding="utf-8") as screen:
        run(resolved_from(recipe), screen=screen, **options)
        screen.seek(0)
        return screen.read()


def test_other_rows_are_named_before_a_length_that_is_counted_with_them(tiny_root: Path, tmp_path: Path) -> None:
    rows = (tiny_root / "train.jsonl").read_text().splitlines(keepends=True)
    file = tmp_path / "own.jsonl"
    file.write_text("".join(rows[:4]))
    recipe = values(tiny_root, tmp_path, 1, train=str(file))
    recipe["schedule"] = {"name": "cosine", "warmup_steps": 0}
    recipe["run"] |= {"max_steps": None, "epochs": 1}
    train(recipe, tmp_path, resume=False)
    file.write_text("".join(rows[:8]))
    recipe["run"]["epochs"] = 2
    with pytest.raises(InputError, match="4 rows were added behind the 4 rows of before"):
        train(recipe, tmp_path, resume=True)


def test_other_rows_stop_a_resume_until_they_are_asked_for(tiny_root: Path, tmp_path: Path) -> None:
    recipe = values(tiny_root, tmp_path, 1)
    original = Path(recipe["data"]["train"])
    file = tmp_path / "own.jsonl"
    lines = original.read_text().splitlines(keepends=True)
    file.write_text("".join(lines))
    train(values(tiny_root, tmp_path, 1, train=str(file)), tmp_path, resume=False)
    file.write_text("".join([*lines, lines[0]]))
    with pytest.raises(InputError, match="1 row was added behind"):
        train(values(tiny_root, tmp_path, 2, train=str(file)), tmp_path, resume=True)
    note = train(values(tiny_root, tmp_path, 2, train=str(file)), tmp_path, resume=True, changed_data=True)
    assert "note: data.train: 1 row was added" in note
    # Later checkpoints have the rows of now; the same rows in another place are the same data.
    moved = file.rename(tmp_path / "moved.jsonl")
    assert "the rows as they are now" not in train(
        values(tiny_root, tmp_path, 3, train=str(moved)), tmp_path, resume=True
    )
    moved.write_text("".join([*reversed(lines), lines[0]]))
    with pytest.raises(InputError, match="another order"):
        train(values(tiny_root, tmp_path, 4, train=str(moved)), tmp_path, resume=True)
    # A checkpoint of an earlier version has no fingerprint.
    newest = finding.newest(tmp_path / "run" / "checkpoints")
    assert newest is not None
    manifest = json.loads((newest / "manifest.json").read_text())
    assert manifest["rows"][0]["rows"] == len(lines) + 1


@pytest.mark.parametrize("spelling", ["absolute", "with ..", "a link", "with a slash", "by another link"])
def test_one_folder_under_another_path_is_the_same_model(spelling: str, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "base"
    folder.mkdir(parents=True)
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "second").symlink_to(tmp_path / "models")
    path = {
        "absolute": str(folder.resolve()),
        "with ..": str(tmp_path / "models" / ".." / "models" / "base"),
        "a link": str(tmp_path / "link"),
        "with a slash": f"{folder}/",
        "by another link": str(tmp_path / "second" / "base"),
    }[spelling]
    other = tmp_path / "models" / "other"
    other.mkdir()
    saved = tmp_path / "saved"
    saved.mkdir()

    def recipe(model: str, tokenizer: str | None = None) -> Recipe:
        return Recipe.model_validate({
            "model": {"path": model}, "tokenizer": {"path": tokenizer}, "data": {"train": "x"}, "run": {"max_steps": 1},
        })  # fmt: skip

    (saved / "recipe.json").write_text(json.dumps(recipe(str(folder), str(folder)).model_dump(mode="json")))
    manifest = {"recipe_version": recipe_version()}
    check_recipe(saved, manifest, recipe(path, path), "r.yaml")
    with pytest.raises(InputError, match=r"model\.path"):
        check_recipe(saved, manifest, recipe(str(other), path), "r.yaml")
    with pytest.raises(InputError, match=r"tokenizer\.path"):
        check_recipe(saved, manifest, recipe(path, str(other)), "r.yaml")


def test_a_model_whose_folder_has_moved_is_the_same(tmp_path: Path) -> None:
    folder, saved = tmp_path / "base", tmp_path / "saved"
    (folder / "more").mkdir(parents=True)
    saved.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "more" / "weights").write_bytes(bytes(3 << 20) + b"end")

    def recipe(path: Path) -> Recipe:
        values = {"model": {"path": str(path)}, "data": {"train": "x"}, "run": {"max_steps": 1}}
        return Recipe.model_validate(values)

    (saved / "recipe.json").write_text(json.dumps(recipe(folder).model_dump(mode="json")))
    manifest = {"recipe_version": recipe_version(), "folders": folder_prints(recipe(folder))}
    moved = folder.rename(tmp_path / "elsewhere")
    check_recipe(saved, manifest, recipe(moved), "r.yaml")
    with pytest.raises(InputError, match=r"model\.path"):  # as of an earlier version, which kept no print
        check_recipe(saved, {"recipe_version": recipe_version()}, recipe(moved), "r.yaml")
    (moved / "more" / "weights").write_bytes(bytes(3 << 20) + b"END")
    with pytest.raises(InputError, match=r"model\.path"):
        check_recipe(saved, manifest, recipe(moved), "r.yaml")
