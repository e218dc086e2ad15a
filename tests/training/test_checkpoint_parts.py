"""Every rank writes its own part of a checkpoint, and reads its own; rank 0 seals when all parts are complete."""

from __future__ import annotations

import io
import shutil
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cases import every_case
from jobs import loader_for, resolved_from
from nights import nightly_but
from tiny import recipe_dict
from toolkit.disk import file_sha256
from toolkit.errors import InputError, RunFailed
from toolkit.launch.group import WorkerGroup
from toolkit.recipe.resolve import Resolved
from toolkit.strategies.engines.pieces import box, span, whole
from toolkit.training import agreement, blocks, checkpoint, safetensors_file, sealing, tensor_folder
from toolkit.training.finding import tensors_of, whole_manifest
from toolkit.training.loop import Progress, train
from toolkit.training.run import run
from toolkit.training.sealing import Ending, Part, join_parts, note_part
from toolkit.training.session import open_session
from toolkit.training.tensor_folder import Entry, TensorReader, TensorWriter, incomplete, read_index


def save_and_load(resolved: Resolved, folder: str, file_bytes: int) -> dict[str, Any]:
    """Save after a step in files of ``file_bytes``, train on, load; the bytes that this rank read, and the weights."""
    session = open_session(resolved)
    engine, rank = session.engine, session.accelerator.process_index
    progress = Progress()
    train(session, loader_for(resolved, rank), 1, progress, lambda pending: None)
    before, tensor_folder.FILE_BYTES = tensor_folder.FILE_BYTES, file_bytes
    read, fill = Counter[str](), blocks._fill
    try:
        saved = checkpoint.save(session, Path(folder), progress)
        weights = {name: engine.full_weight(name) for name in engine.shapes}
        train(session, loader_for(resolved, rank, 1), 2, progress, lambda pending: None)

        def counted(file: Any, begin: int, into: memoryview) -> int:
            read[Path(file.name).name] += len(into)
            return fill(file, begin, into)

        blocks._fill = counted
        loaded = checkpoint.load(session, saved)
    finally:
        tensor_folder.FILE_BYTES = before
        blocks._fill = fill
    same = all(torch.equal(engine.full_weight(name), weight) for name, weight in weights.items())
    return {"weights": weights, "read": read.total(), "same": same, "step": loaded.step}


@pytest.mark.parametrize(
    "strategy", nightly_but(["ddp", "zero1", "zero3", "fsdp1", "fsdp2"], "zero3", "fsdp1", "fsdp2")
)
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
    kept = dict(tensors_of(folder))
    assert all(torch.equal(kept[name], weight) for name, weight in answers[0]["weights"].items())
    total = sum(sizes)
    share = {"ddp": 1.0, "zero1": 0.7}.get(strategy, 0.55)  # copies are read whole, into each rank's copy
    assert all(answer["read"] <= share * total for answer in answers), "each of its bytes once"


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
    if checkpoint.load_newest(session, own, said.append).path is None:
        return {"said": said}
    engine = session.engine
    weights = {name: engine.full_weight(name) for name in engine.shapes}
    return {"weights": weights, "states": {name: engine.full_state(name) for name in engine.shapes}}


@pytest.mark.parametrize("strategy", nightly_but(["ddp", "zero2", "zero3", "fsdp1", "fsdp2"], "zero2"))
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


@every_case(
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


@every_case("block", [16, 64, 1000, 4096, 1024**2])
def test_blocks_are_validated_when_a_part_of_them_is_read(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every byte of the file is damaged in turn: what is read is right, or the damage is reported."""
    monkeypatch.setattr(safetensors_file, "BLOCK_BYTES", block)
    values = {"a": torch.arange(60.0).view(12, 5), "b": torch.arange(9, dtype=torch.bfloat16)}
    index = {name: Entry(tuple(v.shape), v.dtype, [("f", whole(tuple(v.shape)))]) for name, v in values.items()}
    stored = {name: v.view(-1) for name, v in values.items()}
    file = tmp_path / "f"
    files = {"f": safetensors_file.write_tensors(file, stored)}
    good = file.read_bytes()
    assert files["f"]["sha256"] == file_sha256(file)
    assert load_file(file)["b"].equal(values["b"])
    wanted = [("a", None), ("a", span(7, 21)), ("a", box((2, 1), (9, 2), (12, 5))), ("b", None), ("b", span(8, 9))]

    def read(report: Any = None) -> list[torch.Tensor]:
        reader = TensorReader(tmp_path, index, files, report)
        return [reader.get(name, piece) for name, piece in wanted]

    right = read()
    assert right[1].equal(values["a"].view(-1)[7:21])
    assert right[2].equal(values["a"][2:11, 1:3])
    for at in range(len(good)):
        file.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        messages: list[str] = []
        found = read(messages.append)
        assert messages, f"byte {at}"
        assert all(str(file) in one or "elements are in its files" in one for one in messages)
        assert [one.shape for one in found] == [one.shape for one in right]
    file.write_bytes(good[:-3])
    with pytest.raises(InputError, match="checksum mismatch in MiB"):
        read()


def test_a_file_without_checksums_of_blocks_is_read_as_it_is(tmp_path: Path) -> None:
    """Earlier versions wrote them; ``read_manifest`` has hashed the whole file."""
    entry = safetensors_file.write_tensors(tmp_path / "f", {"a": torch.ones(3)})
    kept = {key: entry[key] for key in ("bytes", "sha256")}
    reader = TensorReader(tmp_path, {"a": Entry((3,), torch.float32, [("f", whole((3,)))])}, {"f": kept})
    assert reader.get("a").tolist() == [1, 1, 1]


def damage(folder: Path, rank: int) -> None:
    """Flip a bit of the last value that a rank has written."""
    file = max(folder.glob(f"weights-{rank:05d}-*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 2
    file.write_bytes(content)


def resumed(resolved: Resolved) -> dict[str, Any]:
    said = io.StringIO()
    destroy = torch.distributed.destroy_process_group
    torch.distributed.destroy_process_group = lambda *_: None  # the group is the tests'
    try:
        answer = run(resolved, resume=True, screen=said)
    finally:
        torch.distributed.destroy_process_group = destroy
    last = Path(resolved.recipe.run.output_dir) / "checkpoints" / "step-00000004"
    return {"said": said.getvalue(), "steps": answer["steps"], "weights": dict(tensors_of(last))}


@pytest.mark.parametrize("strategy", nightly_but(["ddp", "zero3", "fsdp1", "fsdp2"], "fsdp2"))
def test_damage_that_one_rank_finds_while_it_loads(
    strategy: str, tiny_root: Path, tmp_path: Path, group: WorkerGroup
) -> None:
    """The run goes back to an earlier checkpoint, or begins anew where there is none: with the same end."""
    folder = tmp_path / "run"
    folder.mkdir()
    changes = {"max_steps": 4, "save_every": 2, "keep": 3, "output_dir": str(folder), "eval_every": None}
    recipe = recipe_dict(tiny_root, strategy={"name": strategy}, run=changes)
    whole_run = group.run(resumed, resolved_from(recipe))[0]
    last, first = (folder / "checkpoints" / f"step-0000000{step}" for step in (4, 2))
    damage(last, 0 if strategy == "ddp" else 1)
    again = group.run(resumed, resolved_from(recipe))[0]
    assert f"skipping an invalid checkpoint: {'' if strategy == 'ddp' else 'rank 1: '}{last}" in again["said"]
    assert f"resumed from {first}" in again["said"]
    damage(last, 0)
    damage(first, 0)
    anew = group.run(resumed, resolved_from(recipe))[0]
    assert anew["said"].count("skipping an invalid checkpoint") == 2
    assert "starting at step 0" in anew["said"]
    for name, weight in whole_run["weights"].items():
        assert again["weights"][name].equal(weight), name
        assert anew["weights"][name].equal(weight), name
