"""Servers without a socket, and folders that they are given."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the extra studio is not installed")
from studio_server import HOST, SECRET, TOKEN, Server
from toolkit.studio.app import Studio, make_app
from toolkit.studio.folders import Folders
from toolkit.studio.gate import Rules

Make = Callable[..., Server]


@pytest.fixture(scope="session")
def make_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    """Servers whose worker processes, which the first request that needs one starts, end with the session."""
    loop = asyncio.new_event_loop()
    made: list[Server] = []

    def make(roots: Sequence[Path] = (), public: bool = False, seconds: float = 200.0) -> Server:
        studio = Studio(Folders.of(roots), tmp_path_factory.mktemp("hub"), public, (seconds, seconds))
        rules = Rules(None, frozenset()) if public else Rules(TOKEN, frozenset({HOST}))
        headers = {"host": HOST} | ({} if public else {"cookie": f"{rules.cookie}={TOKEN}"})
        made.append(Server(studio, make_app(studio, rules), loop, headers))
        return made[-1]

    yield make
    for server in made:
        loop.run_until_complete(server.studio.light.stop())
        loop.run_until_complete(server.studio.heavy.stop())
    loop.close()


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the server is given, ``inside``, and files that it is not to read beside it."""
    root = tmp_path_factory.mktemp("place")
    inside = root / "inside"
    inside.mkdir()
    (root / "secret.json").write_text(json.dumps({"model_type": "llama", "why": SECRET}))
    (root / "config.json").write_text(json.dumps({"model_type": "llama", "why": SECRET}))
    (root / "secret.yaml").write_text(f"train_batch_size: {SECRET}\n")
    (inside / "link.json").symlink_to(root / "secret.json")
    (inside / "linked").symlink_to(root)
    (inside / "note.txt").write_text("hello\n")
    return inside


@pytest.fixture(scope="session")
def local(make_server: Make, place: Path, launches: None) -> Server:
    return make_server([place])


@pytest.fixture(scope="session")
def public(make_server: Make, launches: None) -> Server:
    return make_server(public=True)
