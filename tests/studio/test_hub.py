"""Public mode fetches the config of a hub model: once, small, without a token, and nothing else."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from toolkit.studio.app import MAX_CONFIG, Configs


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stand-in for the hub: the size that it tells of a file, and what was downloaded."""
    seen = SimpleNamespace(size=600, downloads=[])

    def metadata(url: str, **options: Any) -> SimpleNamespace:
        assert options["token"] is False
        assert url.endswith("/config.json")
        return SimpleNamespace(size=seen.size)

    def download(repo: str, name: str, **options: Any) -> str:
        assert options["token"] is False
        seen.downloads.append((repo, name, options["revision"], options["cache_dir"]))
        return ""

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", metadata)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return seen


def test_a_config_is_fetched_once(hub: SimpleNamespace, tmp_path: Path) -> None:
    configs = Configs(tmp_path)
    assert configs.fetch("a/b", None)
    assert not configs.fetch("a/b", None)
    assert configs.fetch("a/b", "main")
    assert hub.downloads == [("a/b", "config.json", None, tmp_path), ("a/b", "config.json", "main", tmp_path)]


@pytest.mark.parametrize("size", [None, MAX_CONFIG + 1])
def test_a_large_file_is_not_fetched(hub: SimpleNamespace, tmp_path: Path, size: int | None) -> None:
    hub.size = size
    assert not Configs(tmp_path).fetch("a/b", None)
    assert hub.downloads == []


def test_what_the_network_does_is_no_error(
    hub: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: Any, **__: Any) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lost)
    assert not Configs(tmp_path).fetch("a/b", None)
    assert hub.downloads == []
