"""Traces kept on disk: a plan says the same with them, and never uses those of anything else."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cases import every_case
from tiny import LLAMA
from toolkit.planning import cache, cache_key
from toolkit.planning import trace as tracing
from toolkit.planning.command import Request, make_plan
from toolkit.planning.loops import LOOPS
from toolkit.planning.predict import Planner
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve

BASE: dict[str, Any] = {
    "model": {"config": LLAMA},
    "tokenizer": {"path": "none"},
    "data": {"train": "none", "max_length": 64},
    "batch": {"micro_size": 2, "accumulation": 1},
    "precision": "bf16",
    "strategy": {"name": "single"},
    "machine": {"device": "cuda", "processes": 1},
    "run": {"max_steps": 2},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "plans"))
    return tmp_path / "plans"


@pytest.fixture
def nothing_traced(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A call after which every trace is an error."""

    def traced(*args: Any, **options: Any) -> None:
        raise AssertionError("traced again")

    return lambda: monkeypatch.setattr(tracing, "trace", traced)


def document(cached: bool = True, loop: str = "toolkit", fit: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    """The plan's JSON without what differs from run to run."""
    recipe = Recipe.model_validate(BASE | more)
    made = make_plan(Request(recipe, gpu="h100", loop=loop, fit=fit, explain=bool(fit), cache=cached)).to_json()
    return {key: value for key, value in made.items() if key not in ("started", "seconds")}


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"fit": ("micro",)}, id="full"),
        pytest.param({"adapter": {"method": "qlora", "r": 4}, "loss": "fused"}, id="qlora and the fused loss"),
        pytest.param({"loop": "trl", "adapter": {"method": "lora", "r": 4}}, id="another loop"),
        pytest.param({"machine": {"device": "cpu", "processes": 1}}, id="a CPU"),
    ],
)
def test_a_plan_says_the_same_with_kept_traces(
    folder: Path, nothing_traced: Callable[[], None], more: dict[str, Any]
) -> None:
    without = document(cached=False, **more)
    assert not folder.exists()
    first = document(**more)
    nothing_traced()
    assert without == first == document(**more)


def test_other_strategies_share_the_traces(folder: Path, nothing_traced: Callable[[], None]) -> None:
    machine = {"device": "cuda", "processes": 2}
    document(strategy={"name": "zero2"}, machine=machine)
    nothing_traced()
    document(strategy={"name": "zero1"}, machine=machine, optimizer={"lr": 1e-5}, run={"max_steps": 3})
    assert len(list(folder.iterdir())) == 1


@every_case(
    "more",
    [
        {"model": {"config": LLAMA | {"hidden_size": 96}}},
        {"model": {"config": LLAMA, "attention": "eager"}},
        {"model": {"config": LLAMA, "freeze": ["model.embed_tokens*"]}},
        {"data": {"train": "none", "max_length": 96}},
        {"data": {"train": "none", "max_length": 64, "packing": True}},
        {"precision": "fp32"},
        {"adapter": {"method": "lora", "r": 4}},
        {"optimizer": {"decay": "all"}},
        {"label_smoothing": 0.1},
        {"z_loss": 1e-4},
        {"loss": "fused"},
        {"strategy": {"name": "fsdp2", "mesh": {"tensor": 2}}, "machine": {"device": "cuda", "processes": 2}},
        {"strategy": {"name": "ddp", "mesh": {"context": 2}}, "machine": {"device": "cuda", "processes": 2}},
        {"loop": "trainer"},
    ],
    ids=lambda more: ",".join(more),
)
def test_whatever_changes_a_trace_changes_its_key(folder: Path, more: dict[str, Any]) -> None:
    def facts(**more: Any) -> tuple[Any, ...]:
        loop = more.pop("loop", "toolkit")
        resolved = resolve(Recipe.model_validate(BASE | more), device="cuda")
        planner = Planner.of(resolved, resolved.recipe.data.max_length, loop)
        return planner.contents, planner.segments_of(resolved)

    with cache.caching(folder):
        own = facts()
    with cache.caching(folder):
        found = facts(**more)
    assert found == facts(**more)
    assert found != own


def _of_another_key(path: Path) -> None:
    kept = json.loads(path.read_text().partition("\n")[2])
    kept["key"] += " "
    body = json.dumps(kept)
    path.write_text(f"{cache._checksum(body)}\n{body}")


def _of_other_buffers(path: Path) -> None:
    checksum, _, body = path.read_text().partition("\n")
    kept = json.loads(body)
    kept["contents"]["buffers"] += 2**20
    path.write_text(f"{checksum}\n{json.dumps(kept)}")


def _without_fields(path: Path) -> None:
    kept = json.loads(path.read_text().partition("\n")[2])
    body = json.dumps({"key": kept["key"], "sources": {}, "contents": {}, "notes": None, "traces": {}})
    path.write_text(f"{cache._checksum(body)}\n{body}")


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda path: path.write_bytes(path.read_bytes()[:-100]), id="cut off"),
        pytest.param(lambda path: path.write_bytes(b""), id="empty"),
        pytest.param(lambda path: path.write_bytes(b"\xff\xfe\x00"), id="no text"),
        pytest.param(_of_other_buffers, id="another number"),
        pytest.param(_of_another_key, id="another key"),
        pytest.param(_without_fields, id="another format"),
    ],
)
def test_a_damaged_entry_is_ignored_and_written_again(
    folder: Path, nothing_traced: Callable[[], None], damage: Callable[[Path], Any]
) -> None:
    first = document()
    (path,) = folder.iterdir()
    damage(path)
    assert document() == first
    nothing_traced()
    assert document() == first


def test_sources_that_changed_make_an_entry_stale(
    folder: Path, tmp_path: Path, nothing_traced: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "modeling.py"
    source.write_text("pass")
    own = cache_key.source_stamps
    monkeypatch.setattr(cache, "source_stamps", lambda: own() | {str(source): cache_key._stamp(str(source))})
    document()
    os.utime(source, ns=(0, 0))
    nothing_traced()
    with pytest.raises(AssertionError, match="traced again"):
        document()


def test_traces_of_sources_that_change_meanwhile_are_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "changed_since", lambda started: True)
    document()
    assert not folder.exists()


def test_versions_and_the_toolkits_source_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for name, value in (("installed", ["torch-0.dist-info"]), ("toolkit_source", "other"), ("FORMAT", 0)):
        with monkeypatch.context() as patch:
            patch.setattr(cache_key, name, value if name == "FORMAT" else lambda value=value: value)
            found.append(cache_key.environment.__wrapped__())
    assert len({*found, cache_key.environment()}) == 4
    assert any(name.startswith("transformers-") for name in cache_key.installed())


def test_what_no_key_can_say_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(loop: Any = LOOPS["toolkit"], **more: Any) -> str | None:
        return cache_key.entry_key(resolve(Recipe.model_validate(BASE | more), device="cuda"), 64, loop, None)

    assert key() is not None
    assert key(dataclasses.replace(LOOPS["toolkit"])) is None
    assert key(model=BASE["model"] | {"trust_remote_code": True}) is None
    assert key(tokenizer={"path": "none", "add_tokens": ["<x>"]}) is None
    monkeypatch.setenv("TOOLKIT_PLUGINS", "json")
    assert key() is None


def test_two_processes_add_to_one_entry(folder: Path) -> None:
    resolved = resolve(Recipe.model_validate(BASE), device="cuda")
    with cache.caching(folder), cache.caching(folder):  # each reads before the other has written
        one = Planner.of(resolved, 64)
    with cache.caching(folder):
        one = Planner.of(resolved, 64)
        one.segments("none", 1, "cast")
        with cache.caching(folder):
            Planner.of(resolved, 64).segments("full", 1, "cast")
    (path,) = folder.iterdir()
    assert len(json.loads(path.read_text().partition("\n")[2])["traces"]) == 2


def test_the_entries_read_longest_ago_are_deleted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document()
    (first,) = folder.iterdir()
    size = first.stat().st_size
    document(precision="bf16-pure")
    (other,) = set(folder.iterdir()) - {first}
    os.utime(other, (1, 1))
    document()  # reads the first
    stray = folder / ".old.partial"
    stray.write_text("")
    os.utime(stray, (1, 1))
    monkeypatch.setattr(cache, "MOST_BYTES", int(1.5 * size))
    document()
    assert list(folder.iterdir()) == [first]


def test_a_folder_that_cannot_be_written_costs_nothing_but_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "file"))
    assert document() == document(cached=False)
    assert "cannot be written (File exists): traces are not kept" in capsys.readouterr().err


def test_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache.default_folder() is None  # «off», in all tests
    monkeypatch.delenv(cache.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache.default_folder() == Path("/somewhere/toolkit/plans")
    monkeypatch.setenv(cache.VARIABLE, "/elsewhere")
    assert cache.default_folder() == Path("/elsewhere")


@pytest.mark.usefixtures("launches")
def test_a_second_plan_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    job = (
        "import atexit, runpy, sys; heavy = {'torch', 'transformers', 'peft', 'accelerate'}; "
        "atexit.register(lambda: print('imported:', sorted(heavy & set(sys.modules)), file=sys.stderr)); "
        "runpy.run_module('toolkit', run_name='__main__')"
    )
    command = [sys.executable, "-c", job, "plan", str(file), "--gpu", "h100", "--lora", "8", "--length", "64"]
    command += ["--json", str(tmp_path / "plan.json"), "--html", str(tmp_path / "plan.html"), "--explain"]
    plans, versions = [], []
    for _ in range(2):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, env=os.environ | {cache.VARIABLE: str(tmp_path / "c")}
        )
        plans.append((done.returncode, done.stdout, done.stderr.splitlines()[-1]))
        versions.append(json.loads((tmp_path / "plan.json").read_text())["versions"])
    assert "torch" in plans[0][2]
    assert plans[1][2] == "imported: []"
    assert plans[0][:2] == plans[1][:2]
    assert versions[0] == versions[1]
    assert versions[1]["torch"]
