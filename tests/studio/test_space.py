"""The Space: what its Dockerfile copies and starts, and the promises of the public mode on the real server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tiny import LLAMA
from toolkit.studio.command import Request, _hosts, hub_cache

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "space" / "Dockerfile").read_text()
CMD = json.loads(re.search(r"^CMD (.*)$", DOCKERFILE, re.M).group(1))  # type: ignore[union-attr]
TEXT = yaml.safe_dump({"model": {"config": LLAMA}, "data": {"train": "x", "max_length": 64},
                       "batch": {"micro_size": 1, "accumulation": 1}, "precision": "bf16",
                       "strategy": {"name": "zero2"}, "machine": {"device": "cuda", "processes": 2},
                       "run": {"max_steps": 3}})  # fmt: skip


def test_what_the_image_copies_is_there_and_not_ignored() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [word for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.M) for word in line.split()[:-1]]
    assert copied
    assert all((ROOT / name).exists() and name in kept for name in copied)
    assert f"app_port: {CMD[-1]}" in (ROOT / "space" / "README.md").read_text()
    assert "--public" in CMD


def test_hosts_of_a_local_and_of_a_public_server() -> None:
    local = _hosts(Request((".",), host="127.0.0.1", port=0), 8717)
    assert "127.0.0.1:8717" in local
    assert "localhost:8717" in local
    assert "127.0.0.1" not in local
    assert _hosts(Request(host="0.0.0.0", port=7860, public=True), 7860) == frozenset()


def test_the_hubs_cache_is_where_huggingface_hub_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert hub_cache() == Path("~/.cache/huggingface/hub").expanduser()
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert hub_cache() == tmp_path / "hub"


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The Dockerfile's command in an environment with nothing of the user's, on a free port of this machine."""
    home = tmp_path_factory.mktemp("home")
    (home / "config.json").write_text('{"model_type": "llama", "why": "secret-of-the-host"}')
    options = [word if word != CMD[-1] else "0" for word in CMD[1:]]
    options[options.index("--host") + 1] = "127.0.0.1"
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "HF_TOKEN": "secret-of-the-host", "TMPDIR": "/tmp"}
    server = subprocess.Popen([sys.executable, "-m", "toolkit", *options], cwd=home, env=environment,
                              stdout=subprocess.PIPE, text=True)  # fmt: skip
    assert server.stdout is not None
    address = re.search(r"http\S+", server.stdout.readline())
    assert address is not None
    yield address.group(0)
    server.terminate()
    server.wait(30)


def ask(address: str, path: str, values: Any = None, host: str | None = None) -> tuple[int, str, dict[str, str]]:
    data = None if values is None else json.dumps(values).encode()
    headers = {"Content-Type": "application/json"} | ({"Host": host} if host else {})
    request = urllib.request.Request(f"{address}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=250) as answer:
            return answer.status, answer.read().decode(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), dict(error.headers)


@pytest.mark.nightly
def test_the_promises_of_the_public_mode(public: str) -> None:
    assert "?token" not in public
    status, page, headers = ask(public, "build", host="someone-studio.hf.space")
    assert (status, "Train it here" in page) == (200, False)
    assert "https://huggingface.co" in headers["content-security-policy"].partition("frame-ancestors")[2]
    for name in ("runs", "data", "reports", "report?file=config.json", "api/runs"):
        assert ask(public, name)[0] == 404, name
    for name in ("runs", "run", "log", "start", "stop", "resume", "data", "reports", "open"):
        assert ask(public, f"api/{name}", {"text": TEXT, "name": "/", "names": ["/"]})[0] == 404, name
    _, answer, _ = ask(public, "api/plan", {"text": TEXT, "gpu": "h100", "memory": None})
    assert json.loads(answer)["problems"] == []
    status, answer, _ = ask(
        public, "api/check", {"files": {"ds.json": '{"zero_optimization": {}, "gradient_cliping": 1}'}}
    )
    assert "DS101" in answer
    for path in (".", "..", "~", "/etc", "./config.json"):
        text = f"model: {{path: '{path}'}}\ndata: {{train: x}}\n"
        for name in ("recipe", "plan"):
            _, answer, _ = ask(public, f"api/{name}", {"text": text, "edits": [], "gpu": "h100", "memory": None})
            assert "secret-of-the-host" not in answer
            assert "reads no folders" in answer
    named = {"a.yaml": "per_device_train_batch_size: 1\ndeepspeed: /proc/self/environ\n"}
    assert "secret-of-the-host" not in ask(public, "api/check", {"files": named})[1]
    remote = TEXT.replace("model:", "model:\n  trust_remote_code: true")
    assert "runs no code" in ask(public, "api/plan", {"text": remote, "gpu": "h100", "memory": None})[1]


@pytest.mark.nightly
def test_a_model_that_is_too_large_to_build_is_given_up(public: str) -> None:
    huge = TEXT.replace("num_hidden_layers: 2", "num_hidden_layers: 100000000")
    assert huge != TEXT
    status, answer, _ = ask(public, "api/plan", {"text": huge, "gpu": "h100", "memory": None})
    assert status in (200, 422)
    assert json.loads(answer)["problems"]
    assert json.loads(ask(public, "api/plan", {"text": TEXT, "gpu": "h100", "memory": None})[1])["problems"] == []
