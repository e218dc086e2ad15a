"""Runs killed with SIGKILL at random moments, saving included: each goes on, and ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ranks import finish, kill, start_ranks
from signalled import steps, write_recipe
from toolkit.training.finding import newest, whole_manifest

KILLS = int(os.environ.get("TOOLKIT_KILLS", "100"))
"""Over all seven strategies."""
STRATEGIES = ["single", "ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2"]
STEPS = 12


@dataclass
class Ended:
    """How a run ended, as far as another must end alike."""

    steps: list[tuple[Any, ...]]
    evaluated: str
    files: dict[str, Any]
    progress: tuple[int, int, dict[str, int]]


def ended(run: Path) -> Ended:
    last = newest(run / "checkpoints")
    assert last is not None
    manifest = whole_manifest(last)
    files = {name: file["sha256"] for name, file in manifest["files"].items() if name != "recipe.json"}
    progress = manifest["step"], manifest["updates"], manifest["optimizer_steps"]
    return Ended(steps(run), (run / "eval.jsonl").read_text(), files, progress)


@dataclass
class Whole:
    begin: float
    """Seconds until the first step was done."""
    seconds: float
    """From there to the end."""
    ended: Ended


def complete(here: Path, size: int, *arguments: str) -> tuple[float, float]:
    """Seconds until the first step was done, and from there to the result."""
    began = time.monotonic()
    ranks = start_ranks(["r.yaml", *arguments], here, size)
    stepping = until_first_step(here, ranks)
    codes = finish(ranks)
    found = {path.name: path.read_text()[-2000:] for path in here.glob("rank*.err")}
    logs = {path.name: path.read_text()[-2000:] for path in here.glob("run/logs/*.log")}
    assert codes == [0] * size, (found, logs)
    ended = time.monotonic() - (time.time() - (here / "run/result.json").stat().st_mtime)
    return stepping - began, max(0.1, ended - stepping)


def until_first_step(here: Path, ranks: list[Any]) -> float:
    """The moment at which there is one, or at which a rank has ended without."""
    log = here / "run/metrics.jsonl"
    while not (log.exists() and log.stat().st_size) and all(rank.is_alive() for rank in ranks):
        time.sleep(0.005)
    return time.monotonic()


def recipe(here: Path, root: Path, strategy: str) -> int:
    size = 1 if strategy == "single" else 2
    write_recipe(
        here,
        root,
        strategy={"name": strategy},
        machine={"processes": size},
        adapter={"r": 4, "dropout": 0.2} if strategy in ("zero3", "fsdp1", "ddp") else None,
        data={"eval": str(root / "eval.jsonl"), "workers": 1},
        # Four windows an epoch, the last one short: kills fall into three epochs.
        run={"output_dir": "run", "max_steps": STEPS, "save_every": 1, "eval_every": 3, "keep": 2},
    )
    return size


def killed_and_resumed(here: Path, size: int, whole: Whole, draw: random.Random) -> tuple[int, bool]:
    """One run killed at a random moment, and gone on with; the step it was killed after, and whether while saving."""
    shutil.rmtree(here / "run", ignore_errors=True)
    ranks = start_ranks(["r.yaml"], here, size)
    if draw.random() < 0.1:
        time.sleep(draw.uniform(0.0, whole.begin))
    else:
        until_first_step(here, ranks)
        time.sleep(draw.uniform(0.0, whole.seconds))
    only = draw.random() < 1 / 3 and size > 1
    if only:
        kill([ranks[draw.randrange(size)]])  # the other one must not wait for ever
        finish(ranks, 60)
    kill(ranks)
    saving = any((here / "run" / "checkpoints").glob(".*.writing"))
    at = newest(here / "run" / "checkpoints")
    complete(here, size, "--resume")
    now = ended(here / "run")
    assert now.steps == whole.ended.steps
    assert now.progress == whole.ended.progress
    assert now.files == whole.ended.files, "weights and moments, bit for bit"
    assert now.evaluated == whole.ended.evaluated
    return (int(at.name.removeprefix("step-")) if at else 0), saving


@pytest.mark.usefixtures("launches")
def test_gone_on_with_at_its_end_it_adds_nothing(tmp_path: Path, tiny_root: Path) -> None:
    size = recipe(tmp_path, tiny_root, "single")
    complete(tmp_path, size)
    whole = ended(tmp_path / "run")
    assert whole.evaluated.count("\n") == STEPS // 3
    complete(tmp_path, size, "--resume")
    assert ended(tmp_path / "run") == whole


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_killed_at_random_moments_it_ends_the_same(strategy: str, tmp_path: Path, tiny_root: Path) -> None:
    size = recipe(tmp_path, tiny_root, strategy)
    complete(tmp_path, size)  # the first start fills the caches of a machine
    shutil.rmtree(tmp_path / "run")
    whole = Whole(*complete(tmp_path, size), ended(tmp_path / "run"))
    assert [step[0] for step in whole.ended.steps] == list(range(1, STEPS + 1))
    share = KILLS // len(STRATEGIES) + (STRATEGIES.index(strategy) < KILLS % len(STRATEGIES))
    draw = random.Random(strategy)
    found = [killed_and_resumed(tmp_path, size, whole, draw) for _ in range(share)]
    text: dict[str, Any] = {"strategy": strategy, "kills": share, "seconds": round(whole.seconds, 1)}
    text |= {"while_saving": sum(saving for _, saving in found), "after_steps": sorted(at for at, _ in found)}
    print(json.dumps(text))
    if (report := os.environ.get("TOOLKIT_KILLS_REPORT")) is not None:
        with Path(report).open("a") as file:
            file.write(json.dumps(text) + "\n")
