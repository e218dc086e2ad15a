"""The parts of the GPU's evidence, tried out on a CPU; and that nothing a CPU gave can stand for a GPU's."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import peers
from benchmarks.gpu_evidence import __main__ as command
from benchmarks.gpu_evidence import machine
from benchmarks.gpu_evidence.cells import Cell, Part, Setting, Skipped, cell_file
from benchmarks.gpu_evidence.machine import Device
from benchmarks.gpu_evidence.parts import PARTS
from benchmarks.gpu_evidence.readme import write_rows
from benchmarks.gpu_evidence.runner import COMPLETE, FAILED, UNFINISHED, Request, run_part
from benchmarks.gpu_evidence.syncs import Waits, warned_waits
from toolkit.errors import InputError
from toolkit.machine import cuda_device_count

ROOT = Path(__file__).parents[2]
CPU = Device("cpu", "cpu")
GPU = Device("cuda", "NVIDIA Test 80GB", 80 * 2**30, "9.0", "13.0", "2.28.9")


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")


def on_cpu(folder: Path, part: str, only: str = "*", minutes: float = 12.0) -> dict[str, dict[str, Any]]:
    """Run cells of a part as the command line does; their records by name."""
    arguments = [part, "--out", str(folder), "--tiny", "--device", "cpu", "--threads", "1", "--only", only]
    status = command.main([*arguments, "--minutes", str(minutes)])
    records = {r["cell"]: r for r in json.loads((folder / f"{part}.json").read_text())["cells"]}
    assert status == COMPLETE, {name: r.get("error") or r.get("result") for name, r in records.items()}
    return records


# ------------------------------------------------------------------ the parts


@pytest.mark.usefixtures("launches")
def test_smoke(tmp_path: Path) -> None:
    records = on_cpu(tmp_path, "smoke", "single-*-full,zero2-bf16-lora,fsdp2-bf16-lora,zero1-fp16-full")
    assert len(records) == 6
    for name, record in records.items():
        if name == "zero1-fp16-full":
            assert "on a GPU only" in record["reason"]
            continue
        result = record["result"]
        assert len(result["losses"]) == len(result["plain_losses"]) == 10
        assert result["losses"][0] != result["losses"][-1]
        assert result["worst_loss_deviation"] <= result["limit"]
        assert result["waits"] is None  # only a GPU has any
    assert records["single-fp32-full"]["result"]["worst_loss_deviation"] < 1e-5


def test_waits_are_put_down_to_the_line_that_asks() -> None:
    """torch's own warning, planted where no GPU gives one."""

    def planted(file: str) -> None:
        code = "import warnings\nwarnings.warn('called a synchronizing CUDA operation (..)', stacklevel=1)"
        exec(compile(code, file, "exec"), {})

    waits = Waits()
    with warnings.catch_warnings(record=True, action="always") as shown, warned_waits(waits):
        planted(str(ROOT / "toolkit/training/loop.py"))
        planted("/any/site-packages/transformers/masking_utils.py")
        planted("/any/site-packages/transformers/masking_utils.py")
        planted("/any/site-packages/torch/nn/utils/clip_grad.py")
        warnings.warn("something else", stacklevel=1)
    assert [str(one.message) for one in shown] == ["something else"]
    found = waits.to_json()
    assert found["toolkit"] == {"toolkit/training/loop.py:2": 1}
    assert found["others"].pop("transformers/masking_utils.py:2") == 2
    # torch waits for whoever called it: here this test.
    [(line, count)] = found["others"].items()
    assert (line.split(":")[0], count) == ("tests/benchmarks/test_gpu_evidence.py", 1)


@pytest.mark.nightly
def test_verify(tmp_path: Path) -> None:
    only = "one-single-full,overflow-fsdp2,two-ddp,kill-ddp-clip-ignored,kill-fsdp2-clip-ignored"
    records = on_cpu(tmp_path, "verify", only)
    assert records["one-single-full"]["result"]["verdict"] == "equivalent"
    assert [one["pass"] for one in records["one-single-full"]["result"]["passes"]] == ["logic", "precision"]
    assert records["overflow-fsdp2"]["result"]["overflow"]
    pair = records["two-ddp"]["result"]
    assert (pair["ran"], pair["backend"], pair["verdict"]) == (True, "gloo", "equivalent")
    kill = records["kill-ddp-clip-ignored"]["result"]
    assert (kill["killed"], kill["right_stage"], kill["processes"]) == (True, True, 2)
    # Whether two processes can run fsdp2 has not been seen: what it would do with a fault tells nothing.
    assert "two-fsdp2 has not run" in records["kill-fsdp2-clip-ignored"]["reason"]


@pytest.mark.usefixtures("launches")
@pytest.mark.nightly
def test_memory(tmp_path: Path) -> None:
    names = "1b-full-single-bf16-none-1x512,1b-full-single-bf16-full-1x512,1b-full-fsdp2-offload-all-bf16-full-1x2048"
    records = on_cpu(tmp_path, "memory", names)
    none, full = (records[name]["result"] for name in names.split(",")[:2])
    for result in (none, full):
        measured = result["measured"]
        assert list(measured["allocated_by_phase"]) == ["load", "forward", "backward", "step"]
        assert measured["peak_reserved_bytes"] is None
        assert result["predicted"]["phases"]
        # Gradients, moments and masters are alive after a step; a prediction of these sizes is within a few percent.
        assert 0.9 < result["predicted_over_measured"] < 1.1
        assert result["fits_as_predicted"]
    peaks = [r["measured"]["allocated_by_phase"]["forward"] for r in (full, none)]
    assert peaks[0] < peaks[1]
    assert "FSDP offloads from a GPU" in records[names.split(",")[2]]["reason"]


@pytest.mark.nightly
def test_speed(tmp_path: Path) -> None:
    records = on_cpu(tmp_path, "speed", "bench,loop-1b-full-single-none*")
    bench = records["bench"]["result"]["cells"]
    assert [cell["label"] for cell in bench] == ["plain", "fused", "packing", "adamw8bit", "qlora", "fp8"]
    assert "moves memory from a GPU" in records["bench"]["result"]["refused"]["activation-offload"]
    assert all(cell["tokens_per_second"] > 0 and cell["mfu"] is None for cell in bench)
    result = records["loop-1b-full-single-none-4x2048"]["result"]
    assert result["tokens_per_second"] > 0
    assert result["kernels"][0]["ms"] > 0


@pytest.mark.nightly
def test_peers(tmp_path: Path) -> None:
    """The shapes differ in numbers only; ragged and full rows, with and without checkpointing."""
    records = on_cpu(tmp_path, "speed", "peers-small")
    result = records["peers-small"]["result"]
    ran, gone = set(result["wall"]), result["missing"]
    assert {"bare", "trainer", "toolkit", "toolkit-packing"} <= ran
    assert ran | set(gone) >= {"sft", "sft-packing"}
    assert not ran & set(gone)
    assert all(rate > 0 for rate in result["wall"].values())
    assert result["peak_allocated_bytes"]["bare"] is None
    assert {ratio["of"] for ratio in result["ratios"]} == {"toolkit", "toolkit-packing"}


@pytest.mark.nightly
def test_peers_of_every_shape(tmp_path: Path) -> None:
    records = on_cpu(tmp_path, "speed", "peers-*")
    full = records["peers-8b-full-rows"]["result"]
    assert set(records) == {"peers-small", "peers-1b", "peers-1b-full-rows", "peers-8b-full-rows"}
    assert full["wall"]["toolkit"] > 0


def test_a_peer_that_is_not_installed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)
    assert peers.missing() == dict.fromkeys(("sft", "sft-packing"), "trl and datasets not installed")
    assert "sft" not in peers.peers()


@pytest.mark.nightly
def test_speed_of_compiled_blocks(tmp_path: Path) -> None:
    bench = on_cpu(tmp_path, "speed", "bench-compile")["bench-compile"]["result"]["cells"]
    assert [cell["label"] for cell in bench] == ["plain", "compile", "compile-fused", "compile-fp8"]
    assert all(cell["tokens_per_second"] > 0 for cell in bench)


@pytest.fixture(scope="module")
def presets_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("presets")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        on_cpu(folder, "presets", "single-lora")
    return folder


@pytest.mark.usefixtures("launches")
@pytest.mark.nightly
def test_presets(presets_folder: Path) -> None:
    [record] = json.loads((presets_folder / "presets.json").read_text())["cells"]
    result = record["result"]
    assert result["twin"]["verdict"] == "equivalent"
    assert {"forward", "gradient"} <= result["twin"]["deviation"]["precision"].keys()
    assert result["tokens_per_second"] > 0
    with pytest.raises(InputError, match="needs results of a GPU"):
        write_rows(presets_folder)


def test_there_are_enough_cells(tmp_path: Path) -> None:
    setting = Setting(CPU, True, None)  # type: ignore[arg-type]  # nothing runs
    cells = {name: [cell.name for cell in part.cells(setting)] for name, part in PARTS.items()}
    assert tuple(cells) == command.NAMES
    assert len(cells["smoke"]) == 7 * 3 * 2
    assert len(cells["memory"]) >= 40
    assert sum(name.startswith("kill-") for name in cells["verify"]) > 150
    assert cells["presets"] == sorted(p.parent.name for p in Path("ds_configs").glob("*/recipe.yaml"))


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("part", command.NAMES)
def test_a_whole_part(part: str, tmp_path: Path) -> None:
    on_cpu(tmp_path, part, minutes=45)


# ------------------------------------------------------------------ the runner


def part_of(**cells: Callable[[Setting], dict[str, Any]]) -> Part:
    return Part("made", "made up", lambda setting: [Cell(name, run, usual=0.0) for name, run in cells.items()])


@pytest.fixture
def request_here(tmp_path: Path) -> Request:
    return Request(tmp_path, CPU, tiny=True, minutes=1.0, threads=1)


def test_a_part_goes_on_where_it_was_stopped(request_here: Request) -> None:
    ran: list[str] = []

    def note(name: str) -> Callable[[Setting], dict[str, Any]]:
        return lambda setting: {"at": ran.append(name)}

    def stop(setting: Setting) -> dict[str, Any]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_part(part_of(one=note("one"), two=stop, three=note("three")), request_here)
    assert run_part(part_of(one=note("one"), two=note("two"), three=note("three")), request_here) == COMPLETE
    assert ran == ["one", "two", "three"]
    # The summary alone is enough to go on from.
    for name in ran:
        cell_file(request_here.folder, "made", name).unlink()
    assert run_part(part_of(one=note("1"), two=note("2"), three=note("3"), four=note("four")), request_here) == COMPLETE
    assert ran == ["one", "two", "three", "four"]


def test_nothing_starts_when_the_time_is_nearly_over(request_here: Request) -> None:
    part = Part("made", "", lambda setting: [Cell("long", lambda setting: {}, usual=90.0)])
    assert run_part(part, request_here) == UNFINISHED
    assert not cell_file(request_here.folder, "made", "long").exists()
    assert run_part(part, replace(request_here, minutes=9.0)) == COMPLETE


def test_a_cell_that_the_end_of_the_part_cuts_off_is_run_again(request_here: Request) -> None:
    part = part_of(slow=lambda setting: time.sleep(30) or {})
    assert run_part(part, replace(request_here, minutes=0.1)) == UNFINISHED
    assert not cell_file(request_here.folder, "made", "slow").exists()


def test_a_failure_is_recorded_and_the_part_goes_on(request_here: Request) -> None:
    def fails(setting: Setting) -> dict[str, Any]:
        raise ValueError("no\nsuch luck")

    def skips(setting: Setting) -> dict[str, Any]:
        raise Skipped("not here")

    cells = {
        "fails": fails,
        "wrong": lambda setting: {"ok": False, "loss": float("nan")},
        "skips": skips,
        "right": lambda setting: {"loss": 1.0},
    }
    assert run_part(part_of(**cells), request_here) == FAILED
    summary = json.loads((request_here.folder / "made.json").read_text())
    assert (summary["done"], summary["failed"], summary["skipped"], summary["complete"]) == (1, 2, 1, True)
    records = {record["cell"]: record for record in summary["cells"]}
    assert records["fails"]["error"] == "such luck"
    assert records["wrong"]["result"]["loss"] == "nan"
    assert records["right"]["device"]["type"] == "cpu"
    assert records["right"]["versions"]["torch"]
    assert "/home/" not in records["fails"]["traceback"]
    assert str(ROOT) not in records["fails"]["traceback"]
    # Failed cells are an answer, until one asks again.
    mended = part_of(**(cells | {"fails": lambda setting: {}, "wrong": lambda setting: {}}))
    assert run_part(mended, request_here) == FAILED
    assert run_part(mended, replace(request_here, retry=True)) == COMPLETE


def test_a_hanging_cell_is_ended(request_here: Request) -> None:
    slow = Cell("slow", lambda setting: time.sleep(60) or {}, usual=0.0, limit=0.5)
    part = Part("made", "", lambda setting: [slow, Cell("next", lambda setting: {}, usual=0.0)])
    assert run_part(part, request_here) == FAILED
    records = {r["cell"]: r for r in json.loads((request_here.folder / "made.json").read_text())["cells"]}
    assert "not done after" in records["slow"]["error"]
    assert records["next"]["status"] == "done"


def _die() -> None:
    os.abort()


def _pid() -> int:
    return os.getpid()


@pytest.mark.usefixtures("launches")
@pytest.mark.nightly
def test_a_process_that_dies_takes_nothing_with_it(request_here: Request) -> None:
    part = part_of(
        dies=lambda setting: {"pid": setting.workers.one.run(_die)},
        lives=lambda setting: {"pids": setting.workers.one.run(_pid)},
        again=lambda setting: {"pids": setting.workers.one.run(_pid)},
    )
    assert run_part(part, request_here) == FAILED
    records = {r["cell"]: r for r in json.loads((request_here.folder / "made.json").read_text())["cells"]}
    assert "died (exit code -6)" in records["dies"]["error"]
    assert records["lives"]["result"] == records["again"]["result"]  # one process serves many cells


# ------------------------------------------------------------------ nothing of a CPU stands for a GPU


def test_without_a_gpu_nothing_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(machine, "cuda_device_count", lambda: 0)
    assert command.main(["all"]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("no NVIDIA GPU was found here")
    assert "\n" not in said


@pytest.mark.skipif(cuda_device_count() > 0, reason="would measure for an hour")
@pytest.mark.usefixtures("launches")
def test_make_says_so_too() -> None:
    done = subprocess.run(["make", "gpu-evidence"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "no NVIDIA GPU was found here" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_cpu_cannot_write_among_the_measurements(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["smoke", "--device", "cpu", "--tiny", "--out", "docs/measurements/h100-2026-01-01"]) == 2
    assert "accepts only results of a GPU" in capsys.readouterr().err
    assert not Path("docs/measurements/h100-2026-01-01").exists()


def test_a_folder_belongs_to_one_device(request_here: Request) -> None:
    part = part_of(one=lambda setting: {})
    assert run_part(part, request_here) == COMPLETE
    for other in (replace(request_here, device=GPU), replace(request_here, tiny=False)):
        with pytest.raises(InputError, match="contains results of another run"):
            run_part(part, other)


def presets_of(device: Device, **changed: Any) -> dict[str, Any]:
    """A presets.json in the form that a GPU's run writes, with made-up figures."""
    twin = {"deviation": {"logic": {}, "precision": {"forward": {"error": 1e-4}, "gradient": {"error": 2.5e-3}}}}
    result = {
        "model": "Llama-3.2-1B shape",
        "peak_allocated_bytes": 3 * 2**30,
        "peak_reserved_bytes": 4 * 2**30,
        "tokens_per_second": 12345.6,
        "twin": twin,
    }
    common = {"device": device.to_json(), "tiny": False}
    cell = {"cell": "zero2", "status": "done", "result": result | changed} | common
    versions = {"torch": "2.11.0", "deepspeed": None}
    return {"written": "2026-01-02T03:04:05+00:00", "command": "the command", "versions": versions, "cells": [cell],
            **common}  # fmt: skip


@pytest.fixture
def readme(tmp_path: Path) -> Path:
    copy = tmp_path / "README.md"
    copy.write_text(Path("ds_configs/README.md").read_text())
    return copy


def test_rows_of_a_gpu_are_written(tmp_path: Path, readme: Path) -> None:
    (tmp_path / "presets.json").write_text(json.dumps(presets_of(GPU)))
    assert write_rows(tmp_path, readme) == 1
    text = readme.read_text()
    row = next(line for line in text.splitlines() if line.startswith("| `zero2` |"))
    assert row.endswith("| Llama-3.2-1B shape | 3.0 | 12,346 | loss 1.0e-04, gradient 2.5e-03 |")
    assert "NVIDIA Test 80GB" in text
    assert "have not been measured yet" not in text
    assert "| `zero3` | full training; weights sharded too | not yet |" in text
    assert write_rows(tmp_path, readme) == 1
    assert readme.read_text() == text


@pytest.mark.parametrize(
    ("summary", "why"),
    [
        (presets_of(CPU), "needs results of a GPU"),
        (presets_of(Device("cuda", "NVIDIA H100")), "needs results of a GPU"),
        (presets_of(GPU, peak_reserved_bytes=None), "no figures of a GPU's allocator"),
        (presets_of(GPU) | {"tiny": True}, "a tiny run"),
        (presets_of(GPU) | {"cells": presets_of(CPU)["cells"]}, "needs results of a GPU"),
        (presets_of(GPU) | {"device": replace(GPU, name="another").to_json()}, "another device"),
    ],
)
def test_no_other_row_is_written(summary: dict[str, Any], why: str, tmp_path: Path, readme: Path) -> None:
    before = readme.read_text()
    (tmp_path / "presets.json").write_text(json.dumps(summary))
    with pytest.raises(InputError, match=why):
        write_rows(tmp_path, readme)
    assert readme.read_text() == before


@pytest.mark.usefixtures("launches")
@pytest.mark.nightly
def test_a_cpu_run_that_calls_itself_a_gpu_has_no_reserved_memory(
    presets_folder: Path, tmp_path: Path, readme: Path
) -> None:
    """Every word of a CPU run's file changed by hand, its figures left: they are not a GPU's."""
    [record] = json.loads((presets_folder / "presets.json").read_text())["cells"]
    summary = presets_of(GPU) | {"cells": [record | {"device": GPU.to_json(), "tiny": False}]}
    (tmp_path / "presets.json").write_text(json.dumps(summary))
    with pytest.raises(InputError, match="no figures of a GPU's allocator"):
        write_rows(tmp_path, readme)
