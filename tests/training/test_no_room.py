"""A checkpoint that cannot be written takes nothing away: the last good one is as it was, and one message says so."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import every_case
from jobs import loader_for, resolved_from
from nights import nightly_but
from signalled import TOOLKIT, write_recipe
from tiny import recipe_dict
from toolkit.errors import InputError, RunFailed
from toolkit.launch.group import WorkerGroup
from toolkit.recipe.resolve import Resolved
from toolkit.training import checkpoint, finding, room
from toolkit.training.loop import Progress, train
from toolkit.training.session import open_session


def save_without_room(resolved: Resolved, folder: str, limit: int, rank: int) -> tuple[str, str, str]:
    """A good checkpoint, then one for which a file may have ``limit`` bytes on a rank, then a good one again."""
    session = open_session(resolved)
    progress = Progress()
    train(session, loader_for(resolved, session.accelerator.process_index), 1, progress, lambda pending: None)
    checkpoint.save(session, Path(folder), progress)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    progress.step += 1
    message = ""
    if session.accelerator.process_index == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        checkpoint.save(session, Path(folder), progress)
    except RunFailed as error:
        message = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    left = " ".join(sorted(path.name for path in Path(folder).iterdir()))
    torch.distributed.barrier()
    return message, left, checkpoint.save(session, Path(folder), progress).name


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("limit", nightly_but([0, 20_000], 20_000))
@pytest.mark.parametrize("strategy", nightly_but(["zero3", "fsdp2"], "zero3"))
def test_no_room_fails_alike_on_every_rank_and_keeps_the_last_good_one(
    strategy: str, limit: int, rank: int, tiny_root: Path, tmp_path: Path, group: WorkerGroup
) -> None:
    resolved = resolved_from(recipe_dict(tiny_root, strategy={"name": strategy}))
    answers = group.run(save_without_room, resolved, str(tmp_path), limit, rank)
    assert answers[0] == answers[1]
    message, left, later = answers[0]
    assert message.startswith(f"{tmp_path}/step-00000002: cannot be written: {'rank 1: ' if rank else ''}")
    assert "File too large" in message
    assert f"the latest checkpoint is {tmp_path}/step-00000001 (intact)" in message
    assert left == "step-00000001", "nothing half-written stays"
    assert later == "step-00000002", "with room again it is saved"
    finding.whole_manifest(tmp_path / "step-00000001")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """1 MiB: room for one checkpoint of the tiny model and its moments, not for two."""
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.nightly
@pytest.mark.usefixtures("launches")
def test_a_full_disk_stops_the_run_cleanly_and_room_lets_it_go_on(small_disk: Path, tiny_root: Path) -> None:
    here = small_disk.parent
    write_recipe(
        here, tiny_root, strategy={"name": "zero2"},
        run={"output_dir": "disk/run", "save_every": 2, "max_steps": 6, "keep": 5},
    )  # fmt: skip
    done = subprocess.run([*TOOLKIT, "train", "r.yaml"], cwd=here, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert "the latest checkpoint is disk/run/checkpoints/step-0000000" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1
    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
    done = subprocess.run(
        [*TOOLKIT, "train", "r.yaml", "--resume"], cwd=here, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "resumed from disk/run/checkpoints/step-0000000" in done.stdout


@pytest.mark.nightly
@pytest.mark.usefixtures("launches")
def test_a_disk_without_room_for_one_checkpoint_is_refused_before_the_first_step(
    small_disk: Path, tiny_root: Path
) -> None:
    here = small_disk.parent
    subprocess.run(["mount", "-o", "remount,size=256k", small_disk], check=True)
    write_recipe(here, tiny_root, strategy={"name": "zero2"}, run={"output_dir": "disk/run", "save_every": 2})
    done = subprocess.run([*TOOLKIT, "train", "r.yaml"], cwd=here, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "r.yaml: run.output_dir: a checkpoint takes about 0.4 MiB" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (here / "disk/run").exists(), "nothing is left behind"


@every_case(
    ("precision", "optimizer", "ema"),
    [("fp32", "adamw", None), ("fp32", "sgd", None), ("fp32", "adamw", {"decay": 0.9}), ("bf16-pure", "lion", None)],
)
def test_the_estimate_is_what_a_checkpoint_takes(
    precision: str, optimizer: str, ema: Any, tiny_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_dict(
        tiny_root, strategy={"name": "single"}, machine={"processes": 1}, precision=precision,
        optimizer={"name": optimizer}, run={"ema": ema, "save_every": 1},
    )  # fmt: skip
    session = open_session(resolved_from(recipe))
    estimate = room.checkpoint_bytes(session)
    free = shutil.disk_usage(tmp_path)._replace(free=estimate)
    monkeypatch.setattr(room.shutil, "disk_usage", lambda folder: free)
    room.check_room(session, tmp_path)
    monkeypatch.setattr(room.shutil, "disk_usage", lambda folder: free._replace(free=estimate - 1))
    with pytest.raises(InputError, match=r"run\.output_dir: a checkpoint takes about 0\.\d MiB .* has 0\.\d MiB free"):
        room.check_room(session, tmp_path)
    progress = Progress()
    train(session, loader_for(session.resolved, 0), 1, progress, lambda pending: None)
    saved = checkpoint.save(session, tmp_path, progress)
    written = sum(file.stat().st_size for file in saved.glob("*.safetensors"))
    assert estimate <= written < 1.1 * estimate + 10_000, "headers beside it"


def test_no_permission(tiny_root: Path, tmp_path: Path) -> None:
    resolved = resolved_from(recipe_dict(tiny_root, strategy={"name": "single"}, machine={"processes": 1}))
    folder = tmp_path / "checkpoints"
    folder.mkdir(mode=0o500)
    session = open_session(resolved)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)  # root may write everywhere; nobody may not
    try:
        with pytest.raises(RunFailed, match=r"cannot be written: Permission denied"):
            checkpoint.save(session, folder, Progress())
    finally:
        if root:
            os.seteuid(0)
