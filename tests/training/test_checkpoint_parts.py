"""Every rank writes its own part of a checkpoint, and reads its own; rank 0 seals when all parts are complete."""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs import loader_for, resolved_from
from tiny import recipe_dict
from toolkit.errors import InputError, RunFailed
from toolkit.launch.group import WorkerGroup
from toolkit.recipe.resolve import Resolved
from toolkit.strategies.engines.pieces import box, span
from toolkit.training import agreement, checkpoint, manifest, sealing, tensor_folder
from toolkit.training.finding import tensors_of, whole_manifest
from toolkit.training.loop import Progress, train
from toolkit.training.sealing import Ending, Part, join_parts, note_part
from toolkit.training.session import open_session
from toolkit.training.tensor_folder import Entry, TensorReader, TensorWriter, incomplete, read_index


def save_and_load(resolved: Resolved, folder: str, file_bytes: int) -> dict[str, Any]:
    """Save after a step in files of ``file_bytes``, train on, load; what this rank hashed and read, and the weights."""
    session = open_session(resolved)
    engine, rank = session.engine, session.accelerator.process_index
    progress = Progress()
    train(session, loader_for(resolved, rank), 1, progress, lambda pending: None)
    before, tensor_folder.FILE_BYTES = tensor_folder.FILE_BYTES, file_bytes
    hashed: list[str] = []
    read, hash_file, get = Counter[str](), manifest.file_sha256, TensorReader.get
    try:
        saved = checkpoint.save(session, Path(folder), progress)
        weights = {name: engine.full_weight(name) for name in engine.shapes}
        train(session, loader_for(resolved, rank, 1), 2, progress, lambda pending: None)

        def noted(path: Path) -> str:
            hashed.append(path.name)
            return hash_file(path)

        def counted(reader: TensorReader, name: str, piece: Any = None) -> torch.Tensor:
            tensor = get(reader, name, piece)
            read["elements"] += tensor.numel()
            return tensor

        manifest.file_sha256, TensorReader.get = noted, counted  # type: ignore[method-assign]
        loaded = checkpoint.load(session, saved)
    finally:
        tensor_folder.FILE_BYTES = before
        manifest.file_sha256, TensorReader.get = hash_file, get  # type: ignore[method-assign]
    same = all(torch.equal(engine.full_weight(name), weight) for name, weight in weights.items())
    return {"weights": weights, "hashed": hashed, "read": read["elements"], "same": same, "step": loaded.step}


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3", "fsdp1", "fsdp2"])
def test_each_rank_writes_and_reads_its_part(
    strategy: str, tiny_root: Path, tmp_path: Path, group: WorkerGroup
) -> None:
    resolved = resolved_from(recipe_dict(tiny_root, strategy={"name": strategy}, precision="bf16"))
    answers = group.run(save_and_load, resolved, str(tmp_path), 16_384)
    folder = tmp_path / "step-00000001"
    content = whole_manifest(folder)
    assert content["schema"] == "toolkit.checkpoint/2"
    by_rank = [sum(p.stat().st_size for p in folder.glob(f"*-{rank:05d}-*.safetensors")) for rank in (0, 1)]
    assert max(by_rank) < 1.3 * min(by_rank)
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    assert len(sizes) > 8
    assert max(sizes) <= 16_384 + 8_192, "a file's header comes on top"
    for answer in answers:
        assert answer["same"]
        assert answer["step"] == 1
    assert sorted(answers[0]["hashed"] + answers[1]["hashed"]) == sorted(content["files"]), "each file by one rank"
    kept = dict(tensors_of(folder))
    assert all(torch.equal(kept[name], weight) for name, weight in answers[0]["weights"].items())
    total = 3 * sum(weight.numel() for weight in kept.values())
    share = {"ddp": 1.0, "zero1": 0.7}.get(strategy, 0.55)  # copies are read whole, into each rank's copy
    assert all(answer["read"] <= share * total for answer in answers)


def written(folder: Path, rank: int, values: torch.Tensor, start: int, shape: tuple[int, ...]) -> None:
    part = Part(steps={"w": 3})
    weights, moments = (
        TensorWriter(folder, f"{kind}-{rank:05d}", lambda action, *rest: action(*rest), part.files)
        for kind in ("weights", "moments")
    )
    weights.add("w", shape, [(span(start, start + values.numel()), values)])
    weights.flush()
    note_part(folder, rank, (weights, moments), part)


def test_rank_0_waits_for_every_part(tmp_path: Path) -> None:
    values, answers = torch.arange(10.0), []
    written(tmp_path, 0, values[:4], 0, (5, 2))
    waiting = threading.Thread(target=lambda: answers.append(join_parts(tmp_path, 2, Ending())))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    written(tmp_path, 1, values[4:], 4, (5, 2))
    waiting.join(10)
    part = answers[0]
    assert incomplete(part.weights, [("w", (5, 2))]) is None
    assert part.steps == {"w": 3}
    assert len(part.files) == 2
    assert not list(tmp_path.glob("part-*"))
    reader = TensorReader(tmp_path, part.weights)
    assert torch.equal(reader.get("w"), values.view(5, 2))
    assert torch.equal(reader.get("w", span(3, 6)), values[3:6])
    column = reader.get("w", box((1, 1), (3, 1), (5, 2)))
    assert torch.equal(column, values.view(5, 2)[1:4, 1:])


def test_an_ending_run_does_not_wait_for_a_killed_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealing, "_PATIENCE_S", 0.3)
    written(tmp_path, 0, torch.ones(4), 0, (5, 2))
    ending = Ending()
    ending.closing.set()
    began = time.monotonic()
    with pytest.raises(RunFailed, match="rank 1 did not complete its part"):
        join_parts(tmp_path, 2, ending)
    assert time.monotonic() - began < 30
    other = Ending()
    other.failed.set()
    with pytest.raises(RunFailed, match="another process could not write"):
        join_parts(tmp_path, 2, other)


def test_a_node_that_does_not_see_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealing, "_SEEN_S", 0.1)
    sealing.wait_for_folder(tmp_path)
    with pytest.raises(RunFailed, match="has not appeared on this node"):
        sealing.wait_for_folder(tmp_path / "elsewhere")


def save_on_own_disks(resolved: Resolved, folder: str) -> dict[str, Any]:
    """Save twice into a folder of each rank's own, as on nodes that share no disk; what lies there, and the weights."""
    agreement._SEEN_S = 0.1
    session = open_session(resolved)
    engine, rank = session.engine, session.accelerator.process_index
    progress = Progress()
    own = Path(folder) / f"node-{rank}"
    try:
        train(session, loader_for(resolved, rank), 1, progress, lambda pending: None)
        checkpoint.save(session, own, progress)
        shared = session.shared_disk
        train(session, loader_for(resolved, rank, 1), 2, progress, lambda pending: None)
        checkpoint.save(session, own, progress)
    finally:
        agreement._SEEN_S = 10.0
    here = sorted(path.name for path in own.rglob("*")) if own.exists() else []
    weights = {name: engine.full_weight(name) for name in engine.shapes}
    states = {name: engine.full_state(name) for name in engine.shapes}
    return {"shared": shared, "here": here, "weights": weights, "states": states}


def load_from_own_disks(resolved: Resolved, folder: str) -> dict[str, Any]:
    session = open_session(resolved)
    own = Path(folder) / f"node-{session.accelerator.process_index}"
    said: list[str] = []
    found = checkpoint.newest_for(session, own, said.append)
    if found is None:
        return {"said": said}
    checkpoint.load(session, found)
    engine = session.engine
    weights = {name: engine.full_weight(name) for name in engine.shapes}
    return {"weights": weights, "states": {name: engine.full_state(name) for name in engine.shapes}}


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "fsdp1", "fsdp2"])
def test_nodes_that_share_no_disk(strategy: str, tiny_root: Path, tmp_path: Path, group: WorkerGroup) -> None:
    recipe = recipe_dict(tiny_root, strategy={"name": strategy}, precision="bf16")
    resolved = resolved_from(recipe)
    main, other = group.run(save_on_own_disks, resolved, str(tmp_path))
    assert (main["shared"], other["shared"]) == (False, False)
    assert not other["here"], "nothing is left on a disk that no checkpoint is read from"
    assert {"step-00000001", "step-00000002"} <= set(main["here"])
    assert not [name for name in main["here"] if "writing" in name or "seen" in name]
    absent = group.run(load_from_own_disks, resolved, str(tmp_path))
    assert all("rank 1" in line for line in absent[0]["said"]), absent
    shutil.copytree(tmp_path / "node-0", tmp_path / "node-1")
    for answer in group.run(load_from_own_disks, resolved, str(tmp_path)):
        for name, weight in main["weights"].items():
            assert torch.equal(answer["weights"][name], weight), name
            now, then = answer["states"][name], main["states"][name]
            assert now.step == then.step == 2
            assert now.moments.keys() == then.moments.keys()
            assert all(torch.equal(now.moments[key], moment) for key, moment in then.moments.items()), name


@pytest.mark.parametrize(
    ("pieces", "problem"),
    [
        ([span(0, 4), span(4, 10)], None),
        ([span(0, 4), span(5, 10)], "w: 9 elements where 10 are trained"),
        ([span(0, 5), span(4, 9)], "w: 10 elements where 10 are trained, some twice"),
        ([], "w: 0 elements where 10 are trained"),
    ],
)
def test_a_tensor_that_is_not_complete_is_not_sealed(pieces: list[Any], problem: str | None) -> None:
    index = {"w": Entry((5, 2), torch.float32, [("f", piece) for piece in pieces])}
    assert incomplete(index, [("w", (5, 2))]) == problem
    assert incomplete(index, [("v", (5, 2))]) == "v: missing where (5, 2) is trained"
    assert incomplete(index, [("w", (2, 5))]) == "w: shape (5, 2) where (2, 5) is trained"


def test_a_piece_without_its_values_is_refused(tmp_path: Path) -> None:
    writer = TensorWriter(tmp_path, "weights-00000", lambda action, *rest: action(*rest), {})
    with pytest.raises(RunFailed, match="w: 0 elements where 4 are trained here; nothing was saved"):
        writer.add("w", (4,), [(span(0, 4), torch.empty(0))])


def test_an_index_of_another_schema_or_a_damaged_one_is_refused(tiny_root: Path, tmp_path: Path) -> None:
    resolved = resolved_from(recipe_dict(tiny_root, strategy={"name": "single"}, machine={"processes": 1}))
    folder = checkpoint.save(open_session(resolved), tmp_path, Progress())
    content = whole_manifest(folder)
    with pytest.raises(InputError, match=r"has schema toolkit\.checkpoint/3, this version reads"):
        read_index(folder, content | {"schema": "toolkit.checkpoint/3"})
    file = folder / "index.json"
    file.write_text(file.read_text().replace("[", "[ ", 1))
    with pytest.raises(InputError, match=r"index\.json: damaged: checksum mismatch"):
        read_index(folder, content)
