"""Packages may lie in several folders: pip's user folder, Debian's dist-packages, PYTHONPATH of a module system."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from toolkit.studio.sandbox import Sandbox


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return tmp_path / "other"


def installed(folder: Path) -> Path:
    """A folder with a package in it."""
    (folder / "thing-1.0.dist-info").mkdir(parents=True)
    (folder / "thing-1.0.dist-info" / "METADATA").write_text("Name: thing\nVersion: 1.0\n")
    return folder


def sandbox(tmp_path: Path) -> Sandbox:
    (tmp_path / "own").mkdir()
    return Sandbox(tmp_path / "own", (), None, False)


@pytest.mark.parametrize("name", ["lib/python3.11/site-packages", "dist-packages", "modules/torch/2.13"])
def test_a_second_folder_of_packages_can_be_listed_and_read(
    name: str, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = installed(other / name)
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    box = sandbox(tmp_path)
    assert box.may_read(str(folder)), "importlib.metadata lists it"
    assert box.may_read(f"{folder}/")
    assert box.may_read(str(folder / "thing-1.0.dist-info" / "METADATA"))
    assert not box.may_read(str(other))
    assert not box.may_read(f"{folder}-private/secret")
    assert not box.may_read(f"{folder}/../secret")


def test_a_link_to_a_folder_of_packages_is_the_folder(
    other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = installed(other / "real")
    (tmp_path / "site-packages").symlink_to(folder)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "site-packages")])
    box = sandbox(tmp_path)
    assert box.may_read(str(tmp_path / "site-packages" / "thing"))
    assert box.may_read(str(folder / "thing"))


def test_other_folders_of_the_path_stay_closed(other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other.mkdir()
    (other / "notes.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(other), "", "/nowhere", *sys.path])
    assert not sandbox(tmp_path).may_read(str(other / "notes.py"))


def test_a_project_that_is_installed_editable_is_no_folder_of_packages(
    other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (other / "project.egg-info").mkdir(parents=True)
    (other / ".env").write_text("TOKEN=secret")
    monkeypatch.setattr(sys, "path", [*sys.path, str(other)])
    assert not sandbox(tmp_path).may_read(str(other / ".env"))
