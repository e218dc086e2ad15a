"""Without a network a name on the hub is looked for in its cache, at once."""

from __future__ import annotations

import os
import socket
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from toolkit.errors import InputError
from toolkit.inspection.command import Request, data_command
from toolkit.recipe import hub


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(hub, "getproxies", dict)
    monkeypatch.setattr(hub, "_checks", {})
    monkeypatch.setattr(hub, "_set_here", False)
    yield
    monkeypatch.undo()


@pytest.fixture
def port() -> Iterator[int]:
    """One that nothing listens at."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def test_the_cache_alone_where_nothing_answers(online: None, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    datasets = types.ModuleType("datasets.config")
    monkeypatch.setitem(sys.modules, "datasets.config", datasets)
    hub.use_cache_if_offline("owner/name")
    assert constants.HF_HUB_OFFLINE
    assert os.environ["HF_HUB_OFFLINE"] == "1"  # for the ranks
    assert datasets.HF_HUB_OFFLINE
    assert datasets.HF_DATASETS_OFFLINE


def test_a_network_that_comes_back_is_used(online: None, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(hub.time, "monotonic", lambda: clock[0])
    with socket.socket() as later:
        later.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{later.getsockname()[1]}")
        hub.use_cache_if_offline("owner/name")
        later.listen()
        hub.use_cache_if_offline("owner/name")
        assert constants.HF_HUB_OFFLINE  # asked a moment ago
        clock[0] += 61
        hub.use_cache_if_offline("owner/name")
    assert not constants.HF_HUB_OFFLINE
    assert "HF_HUB_OFFLINE" not in os.environ
    clock[0] += 3600
    hub.use_cache_if_offline("owner/name")  # what answered once is not asked again
    assert not constants.HF_HUB_OFFLINE


def test_whoever_turned_it_off_keeps_it_off(online: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{listening.getsockname()[1]}")
        hub.use_cache_if_offline("owner/name")
    assert constants.HF_HUB_OFFLINE


def test_nothing_is_changed_otherwise(online: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{listening.getsockname()[1]}")
        hub.use_cache_if_offline("owner/name")
    hub._checks.clear()  # from here on nothing answers
    hub.use_cache_if_offline(str(tmp_path))
    hub.use_cache_if_offline(None)
    monkeypatch.setattr(hub, "getproxies", lambda: {"https": "http://proxy:3128"})
    hub.use_cache_if_offline("owner/name")
    assert not constants.HF_HUB_OFFLINE
    assert "HF_HUB_OFFLINE" not in os.environ


def test_a_name_that_cannot_be_had_is_asked_for_without_waiting(
    online: None, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took 45 seconds: each of a tokenizer's files was asked for six times, with pauses."""
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home"))
    (tmp_path / "x.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "recipe.yaml").write_text(
        f"model: {{path: owner/name}}\ndata: {{train: {tmp_path}/x.jsonl, max_length: 8}}\nrun: {{max_steps: 1}}\n"
    )
    with pytest.raises(InputError, match=r"model\.path: no folder owner/name here, .* cannot be reached"):
        data_command(Request(str(tmp_path / "recipe.yaml")))
    assert waits == []
