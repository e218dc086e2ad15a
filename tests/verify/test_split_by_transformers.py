"""Models that transformers splits over ranks by itself are recorded and proven; a recorder that fails harms no job."""

from __future__ import annotations

from pathlib import Path

import pytest
import split_loops as loops
import torch

from nights import nightly_but
from toolkit.launch.group import WorkerGroup
from toolkit.verification.scripts.run import prepare, whole
from toolkit.verification.scripts.verify import verify_unit

WAYS = [
    "scripts.recording:keep_model:0:1",
    "scripts.recording:keep_model:1:1",
    "scripts.kept_model:_structure:0:1",
    "scripts.kept_model:whole:0:3",
    "scripts.kept_model:whole:1:9",
    "scripts.recording:Calls.__init__:1:1",
    "scripts.recording:Watched.__init__:0:1",
    "scripts.recording:Watched.__init__:1:1",
    "scripts.watch:whole:0:2",
    "scripts.watch:whole:1:30",
    "scripts.watch:whole:0:1",
    "scripts.watch:whole:1:25",
    "scripts.watch:whole:0:50",
    "scripts.recording:Recording.backward_from:1:2",
    "scripts.recording:Recording.clipping:0:1",
    "scripts.recording:Recording.clipped:1:2",
    "scripts.recording:Recording.before_step:1:1",
    "scripts.recording:Recording.before_step:0:2",
    "scripts.recording:Recording.after_step:1:1",
    "scripts.recording:Recording.after_step:0:3",
    "scripts.recording:facts_of:1:1",
    "scripts.recording:save_plain:0:1",
    "scripts.session:units_holding:0:1",
    "scripts.session:Session.after_step:1:2",
    "scripts.session:Recording:1:1",
    "scripts.together:Together.meet:1:2",
    loops.OTHER_MACHINES,
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of the models that the loops read."""
    folder = tmp_path_factory.mktemp("models")
    for kind in ("fsdp", "experts"):
        loops.save_model(kind, folder / kind)
    return {kind: str(folder / ("experts" if kind == "experts" else "fsdp")) for kind in loops.CONFIGS}


def _same(told: list[loops.Told], alone: list[loops.Told]) -> bool:
    return all(
        a[0] == b[0] and a[1].keys() == b[1].keys() and all(torch.equal(a[1][n], b[1][n]) for n in a[1])
        for a, b in zip(told, alone, strict=True)
    )


def _prove(kind: str, models: dict[str, str], group: WorkerGroup, tmp_path: Path) -> None:
    alone = [told for told, _ in group.run(loops.recorded, kind, models[kind], None, timeout=120)]
    prepare(tmp_path, 3, 0, False)
    answers = group.run(loops.recorded, kind, models[kind], str(tmp_path), timeout=120)
    assert [error for _, error in answers] == [None] * len(answers)
    assert _same([told for told, _ in answers], alone)
    assert whole(tmp_path / "models" / "0")
    found = verify_unit(tmp_path / "models" / "0")
    assert found.outcome.verdict == "equivalent", found.outcome.difference
    assert found.facts.strategy == ("tensor" if kind == "tensor" else "fsdp2")


@pytest.mark.parametrize("kind", nightly_but(["fsdp", "mixed", "tensor", "experts"], "tensor"))
def test_it_is_recorded_and_proven(kind: str, models: dict[str, str], group: WorkerGroup, tmp_path: Path) -> None:
    """Recording ended on one rank («Cannot copy out of meta tensor»), the ranks lost step, and the job died."""
    _prove(kind, models, group, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["hybrid", "both"])
def test_on_four_ranks(kind: str, models: dict[str, str], four: WorkerGroup, tmp_path: Path) -> None:
    _prove(kind, models, four, tmp_path)


def test_a_recorder_that_fails_harms_no_job(models: dict[str, str], group: WorkerGroup, tmp_path: Path) -> None:
    """In whatever it fails, and on whichever rank: all stop recording, the job ends with the same bits."""
    alone = [told for told, _ in group.run(loops.recorded, "fsdp", models["fsdp"], None, timeout=60)]
    for at, way in enumerate(WAYS):
        session = tmp_path / str(at)
        session.mkdir()
        prepare(session, 3, 0, False)
        answers = group.run(loops.recorded, "fsdp", models["fsdp"], str(session), way, timeout=60)
        assert _same([told for told, _ in answers], alone), way
        assert not whole(session / "models" / "0"), way
