"""A small hub on this machine: one folder as the model me/small, and repositories that are not given."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "a" * 40


class _Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_: Any) -> None:
        """Nothing on the screen."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        code, data, head, torn = self._found()
        self.send_response(code)
        for name, value in ({"Content-Type": "application/json"} | head).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if torn else data)
            self.close_connection = torn

    def _found(self) -> tuple[int, bytes, dict[str, str], bool]:
        """Status, contents and further headers, and whether the contents break off."""
        path = self.path.partition("?")[0]
        self.server.asked.append(f"{self.command} {path}")
        parts = path.strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        repo, rest = ("/".join(parts[2:4]), parts[4:]) if api else ("/".join(parts[:2]), parts[2:])
        if repo == "me/gated":
            return 401, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "restricted"}, False
        if repo not in ("me/small", "me/torn"):
            return 401, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "no such repository"}, False
        files = {file.name: file for file in self.server.folder.iterdir()}
        if api and rest[:1] != ["tree"]:
            siblings = [{"rfilename": name} for name in files]
            return 200, json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode(), {}, False
        if api and len(rest) == 2:
            tree = [{"type": "file", "path": n, "size": f.stat().st_size, "oid": COMMIT} for n, f in files.items()]
            return 200, json.dumps(tree).encode(), {}, False
        if api or rest[-1] not in files:
            return 404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Error-Message": "no such file"}, False
        data = files[rest[-1]].read_bytes()
        head = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
        return 200, data, head, repo == "me/torn" and rest[-1].endswith(".safetensors")


class _Server(ThreadingHTTPServer):
    folder: Path
    asked: list[str]


@contextmanager
def hub_of(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """The address of a hub whose model me/small is ``folder``, and what it is asked. me/torn breaks off in its weights,
    me/gated is gated, and others do not exist."""
    server = _Server(("127.0.0.1", 0), _Hub)
    server.folder, server.asked = folder, []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", server.asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
