"""The token of a folder's server stays the same over restarts, and only its owner can read it."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from toolkit.studio.token import kept_token


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "toolkit" / "studio"


def test_a_restart_has_the_same_token_and_another_folder_another(cache: Path) -> None:
    first = kept_token([Path("/a")])
    assert len(first) == 32
    assert kept_token([Path("/a")]) == first
    assert kept_token([Path("/a"), Path("/b")]) != first
    for file in cache.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("harm", ["readable by others", "a link", "of another form"])
def test_a_file_that_is_not_safe_is_replaced(harm: str, cache: Path, tmp_path: Path) -> None:
    first = kept_token([Path("/a")])
    (file,) = cache.iterdir()
    if harm == "readable by others":
        file.chmod(0o644)
    elif harm == "a link":
        (tmp_path / "known").write_text("x" * 32)
        file.unlink()
        file.symlink_to(tmp_path / "known")
    else:
        file.write_text("short")
    again = kept_token([Path("/a")])
    assert again not in (first, "x" * 32, "short")
    if harm != "a link":  # it stays refused, and each start has a token of its own
        assert kept_token([Path("/a")]) == again
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_without_a_cache_there_is_a_token_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(kept_token([Path("/a")])) == 32
