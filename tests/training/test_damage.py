"""Checkpoints damaged in every way that disks and people have: none is loaded in silence."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jobs import resolved_from, train_job
from tiny import recipe_dict
from toolkit.errors import InputError
from toolkit.launch.identity import check_recipe
from toolkit.training import checkpoint
from toolkit.training.finding import newest, whole_manifest
from toolkit.training.session import Session, open_session

Saved = dict[str, Path]
Harm = Callable[[Path, Saved, random.Random], str]


def recipe_of(root: Path, **change: Any) -> dict[str, Any]:
    sections = {"strategy": {"name": "single"}, "machine": {"processes": 1}, "adapter": {"r": 2}} | change
    return recipe_dict(root, **sections)


@pytest.fixture(scope="module")
def saved(tiny_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Two checkpoints of one run, one of the same step of another, and one under another recipe."""
    folders: Saved = {}
    for name, change in {"run": {}, "other data": {"run": {"seed": 4}}, "other": {"optimizer": {"lr": 0.5}}}.items():
        recipe = recipe_of(tiny_root, **change)
        folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
        train_job(resolved_from(recipe), 2, str(folder), None, 4)
        folders[name] = folder / "step-00000002"
        if name == "run":
            train_job(resolved_from(recipe), 1, str(folder), str(folders[name]), 4)
            folders["later"] = folder / "step-00000003"
    return folders


def flip(bad: Path, saved: Saved, draw: random.Random) -> str:
    file = draw.choice(sorted(bad.iterdir()))
    content = bytearray(file.read_bytes())
    for _ in range(draw.choice([1, 1, 1, 2, 16])):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)
    return f"bits flipped in {file.name}"


def truncate(bad: Path, saved: Saved, draw: random.Random) -> str:
    file = draw.choice(sorted(bad.iterdir()))
    content = file.read_bytes()
    file.write_bytes(content[: draw.choice([0, 1, len(content) - 1, draw.randrange(len(content))])])
    return f"{file.name} truncated"


def lengthen(bad: Path, saved: Saved, draw: random.Random) -> str:
    file = draw.choice([path for path in sorted(bad.iterdir()) if path.suffix == ".safetensors"])
    file.write_bytes(file.read_bytes() + bytes(draw.randrange(1, 99)))
    return f"{file.name} lengthened"


def zero_a_block(bad: Path, saved: Saved, draw: random.Random) -> str:
    """What a file system gives back after a crash: the size is right, a block of it was never written."""
    file = draw.choice([path for path in sorted(bad.iterdir()) if path.suffix == ".safetensors"])
    content = bytearray(file.read_bytes())
    start = draw.randrange(max(1, len(content) - 512))
    if not any(content[start : start + 512]):
        start = 0
    content[start : start + 512] = bytes(len(content[start : start + 512]))
    file.write_bytes(content)
    return f"a block of {file.name} zeroed"


def remove(bad: Path, saved: Saved, draw: random.Random) -> str:
    file = draw.choice(sorted(bad.iterdir()))
    file.unlink()
    return f"{file.name} missing"


def swap_inside(bad: Path, saved: Saved, draw: random.Random) -> str:
    first, second = draw.sample([path for path in sorted(bad.iterdir()) if path.name != "manifest.json"], 2)
    held = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(held)
    return f"{first.name} and {second.name} swapped"


def swap_from(bad: Path, saved: Saved, draw: random.Random) -> str:
    """A file of the same name and size out of another checkpoint."""
    source = saved[draw.choice(["later", "other data"])]
    file = draw.choice(["weights-00000-00001.safetensors", "moments-00000-00001.safetensors"])
    shutil.copy(source / file, bad / file)
    return f"{file} of {source}"


def another_step(bad: Path, saved: Saved, draw: random.Random) -> str:
    shutil.rmtree(bad)
    shutil.copytree(saved["later"], bad)
    return "a whole checkpoint under another's name"


def another_recipe(bad: Path, saved: Saved, draw: random.Random) -> str:
    shutil.rmtree(bad)
    shutil.copytree(saved[draw.choice(["other", "other data"])], bad)
    return "a whole checkpoint of another recipe"


def edited(bad: Path, saved: Saved, draw: random.Random) -> str:
    """A manifest that was changed by hand or by a merge."""
    manifest = json.loads((bad / "manifest.json").read_text())
    key = draw.choice(sorted(manifest))
    manifest[key] = {"step": 1, "updates": 0}.get(key) if isinstance(manifest[key], int) else None
    if draw.random() < 0.5:
        del manifest[key]
    (bad / "manifest.json").write_text(json.dumps(manifest))
    return f"manifest's {key} edited"


HARMS: list[Harm] = [
    *(flip, flip, truncate, lengthen, zero_a_block, remove),
    *(swap_inside, swap_from, another_step, another_recipe, edited),
]


@pytest.fixture(scope="module")
def session(tiny_root: Path) -> Session:
    return open_session(resolved_from(recipe_of(tiny_root)))


def harmed(session: Session, saved: Saved, folder: Path, count: int) -> list[str]:
    """What was damaged and yet was loaded, or hashed, as if nothing were."""
    bad = folder / "step-00000002"
    draw = random.Random(0)
    silent = []
    for number in range(count):
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(saved["run"], bad)
        before = {path.name: path.read_bytes() for path in bad.iterdir()}
        message = HARMS[number % len(HARMS)](bad, saved, draw)
        after = {path.name: path.read_bytes() for path in bad.iterdir()}
        if _same(before, after):
            continue  # one bit flipped twice, or a blank made a line end in the manifest: it says the same
        for how in (partial(checkpoint.load, session), partial(hashed, session)):
            try:
                how(bad)
            except InputError as error:
                if str(bad) in str(error):
                    continue
                message += ", not named"
            silent.append(f"{number}: {message}")
    return silent


def hashed(session: Session, folder: Path) -> None:
    """What reads no tensor, as the search for the newest checkpoint does."""
    check_recipe(folder, whole_manifest(folder), session.resolved.recipe, "recipe.yaml")


def _same(before: dict[str, bytes], after: dict[str, bytes]) -> bool:
    def content(files: dict[str, bytes]) -> dict[str, object]:
        try:
            return files | {"manifest.json": json.loads(files["manifest.json"])}
        except (ValueError, KeyError):
            return dict(files)

    return content(before) == content(after)


def test_the_undamaged_one_is_loaded(session: Session, saved: Saved) -> None:
    for name in ("run", "later"):
        assert checkpoint.load(session, saved[name]).step == {"run": 2, "later": 3}[name]


def test_damaged_checkpoints_are_not_loaded_in_silence(session: Session, saved: Saved, tmp_path: Path) -> None:
    assert harmed(session, saved, tmp_path, 5 * len(HARMS)) == []


@pytest.mark.nightly
def test_a_thousand_damaged_checkpoints(session: Session, saved: Saved, tmp_path: Path) -> None:
    assert harmed(session, saved, tmp_path, 1000) == []


def test_resume_goes_back_to_the_newest_whole_one(saved: Saved, tmp_path: Path) -> None:
    for name in ("run", "later"):
        shutil.copytree(saved[name], tmp_path / saved[name].name)
    assert newest(tmp_path) == tmp_path / "step-00000003"
    flip(tmp_path / "step-00000003", saved, random.Random(1))
    messages: list[str] = []
    assert newest(tmp_path, messages.append) == tmp_path / "step-00000002"
    assert "step-00000003" in messages[0]
