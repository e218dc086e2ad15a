"""Thousands of requests of someone who means harm: every one is answered, with no traceback and nothing from outside
the given folders. Seeded: a failure names the request that shows it again."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path
from typing import Any

import pytest

from studio_server import HOST, SECRET, TOKEN, Answer, Server

ROUTES = (
    "recipe",
    "plan",
    "archive",
    "check",
    "fix",
    "explain",
    "migrate",
    "import",
    "runs",
    "run",
    "log",
    "start",
    "stop",
    "resume",
    "data",
    "reports",
    "open",
)
TEXTS = (
    "",
    " ",
    "\0",
    "a" * 5000,
    "../" * 30 + "etc/passwd",
    "/etc/passwd",
    "/proc/self/environ",
    "file:///etc/passwd",
    "<script>alert(1)</script>",
    "'\"><img src=x onerror=alert(1)>",
    "{{7*7}}",
    "${jndi:ldap://x}",
    "%2e%2e%2fetc%2fpasswd",
    "\u202etxt.exe",
    "a\r\nset-cookie: x=1",
    "~",
    "~root",
    "CON",
    "🦙" * 50,
    "null",
    "NaN",
    "1e999",
    "!!python/object:os.system x",
    "- " * 500,
    "[" * 3000,
    "{" * 300,
    "&a [*a, *a]",
    "x: &a {y: 1}\nz: {<<: *a}\n",
    "? [a]\n: b",
    "%YAML 9.9\n---\n",
    "a: b: c",
    "\t",
    "---\n---\n",
    "*x",
    "a: !!binary xx",
    "\ufeff{}",
    "2024-01-01",
    "0o777",
    "_" * 300,
)
KEYS = ("text", "edits", "gpu", "memory", "files", "to", "code", "name", "names", "log", "only", "evaluation", "x")


def value(draw: random.Random, deep: int = 0) -> Any:
    kind = draw.randrange(9 if deep < 3 else 6)
    if kind < 3:
        return (
            draw.choice(TEXTS) if draw.random() < 0.7 else "".join(draw.choices(string.printable, k=draw.randrange(60)))
        )
    if kind == 3:
        return draw.choice([0, -1, 1, 2**63, 10**30, 1.5, -0.0, 1e300, 3])
    if kind == 4:
        return draw.choice([None, True, False])
    if kind == 5:
        return []
    if kind == 6:
        return [value(draw, deep + 1) for _ in range(draw.randrange(4))]
    return {str(draw.choice((*TEXTS, *KEYS)))[:600]: value(draw, deep + 1) for _ in range(draw.randrange(4))}


def body(draw: random.Random) -> bytes:
    kind = draw.randrange(10)
    if kind == 0:
        return bytes(draw.randrange(256) for _ in range(draw.randrange(80)))
    if kind == 1:
        return draw.choice(
            [
                b"",
                b"[]",
                b"1",
                b'"',
                b"[" * 100_000,
                b'{"text":"\\ud800"}',
                b'{"a":' + b"9" * 6000 + b"}",
                b'{"text": NaN}',
                b'{"text":"\\u0000"}',
                b"{" + b'"a":' * 5000,
            ]
        )
    return json.dumps({key: value(draw) for key in draw.sample(KEYS, draw.randrange(1, 6))}).encode()


def headers(draw: random.Random, server: Server, data: bytes) -> list[tuple[str, str]]:
    found = [*server.headers.items(), ("content-type", "application/json"), ("content-length", str(len(data)))]
    odd = (
        "origin",
        "host",
        "cookie",
        "content-length",
        "content-type",
        "sec-fetch-site",
        "authorization",
        "x-forwarded-host",
        "transfer-encoding",
        "range",
        "if-none-match",
        "accept-encoding",
        "expect",
    )
    for _ in range(draw.choice([0, 0, 0, 1, 3])):
        text = draw.choice([*TEXTS, f"http://{HOST}", HOST, f"toolkit-studio={TOKEN}"])
        found.append((draw.choice(odd), text.encode("utf-8", "replace").decode("latin-1")[:9000]))
    return found


def path(draw: random.Random) -> str:
    kind = draw.randrange(6)
    if kind < 3:
        return f"/api/{draw.choice(ROUTES)}"
    if kind == 3:
        return f"/static/{draw.choice(TEXTS)}"
    if kind == 4:
        return draw.choice(
            ["/report", "/build", "/runs", "/", "//", "/api/", "/static/", "/build/..", "/static/../app.py"]
        )
    return f"/{draw.choice(TEXTS)}"


def fine(answer: Answer, asked: object) -> None:
    assert 200 <= answer.status < 600, asked
    assert b"Traceback" not in answer.body, asked
    assert SECRET.encode() not in answer.body, asked
    assert b"root:x:0" not in answer.body, asked
    assert "content-security-policy" in answer.headers, asked
    assert "\n" not in "".join(answer.headers.values()), asked
    assert answer.status != 500, (asked, answer.body)
    if answer.headers.get("content-type", "").startswith("text/html"):
        assert b"<script>alert" not in answer.body, asked
        assert b"onerror=alert" not in answer.body, asked


def storm(server: Server, count: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(*_: object, **__: object) -> dict[str, Any]:
        # The workers have storms of their own, below: here the server itself is asked.
        return {"files": {"recipe.yaml": ""}, "problems": [], "model": None, "page": "", "refused": 0}

    monkeypatch.setattr(server.studio.light, "call", nothing)
    monkeypatch.setattr(server.studio.heavy, "call", nothing)
    monkeypatch.setattr("subprocess.Popen", lambda *a, **k: pytest.fail("a process was started"))
    draw = random.Random(seed)
    for number in range(count):
        data = body(draw)
        method = draw.choice(["GET", "POST", "POST", "POST", "HEAD", "PUT"])
        query = draw.choice(
            [b"", b"", f"file={draw.choice(TEXTS)}".encode(), b"kept=x", b"token=x", b"file=%00", b"\xff=\xff"]
        )
        asked = (seed, number, method, where := path(draw), data[:200])
        fine(server.ask(where, method=method, query=query, body=data, headers=headers(draw, server, data)), asked)


@pytest.mark.parametrize("seed", [0, 1])
def test_hostile_requests(local: Server, public: Server, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    storm(local, 1500, seed, monkeypatch)
    storm(public, 500, seed, monkeypatch)


@pytest.mark.nightly
def test_ten_thousand_hostile_requests(local: Server, public: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    storm(local, 8000, 100, monkeypatch)
    storm(public, 2000, 101, monkeypatch)


# ---- files and recipes, in the workers ----

_RECIPES = (
    "model: {{path: {p}}}\ndata: {{train: {p}}}\n",
    "model: {{path: {p}}}\ntokenizer: {{path: {p}}}\ndata: {{train: x}}\n",
    "model: {{config: {{model_type: llama}}}}\nadapter: {{path: {p}}}\n"
    "data: {{train: {p}, chat_template: {p}, cache: {p}}}\n",
    "model: {{config: {{model_type: llama, hidden_size: {n}, num_hidden_layers: {n}}}}}\ndata: {{train: {p}}}\n",
    "model: {{path: {p}, trust_remote_code: true}}\ndata: {{train: x}}\nrun: {{output_dir: {p}}}\n",
)
_CONFIGS = (
    '{{"zero_optimization": {{"stage": {n}}}, "deepspeed": "{p}"}}',
    "deepspeed: {p}\nper_device_train_batch_size: {n}\n",
    "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\n"
    "deepspeed_config: {{deepspeed_config_file: {p}}}\n",
    "#!/bin/bash\naccelerate launch --config_file {p} train.py --deepspeed {p}\n",
    "base_model: {p}\ndatasets: [{{path: {p}}}]\n",
    "model_name_or_path: {p}\ndataset: x\ndataset_dir: {p}\nfinetuning_type: lora\nstage: sft\ndeepspeed: {p}\n",
    "{t}",
)


def paths(place: Path) -> list[str]:
    up = str(place.parent)
    return [
        f"{up}/secret.json",
        f"{up}/secret.yaml",
        up,
        "../secret.json",
        "link.json",
        f"{place}/link.json",
        f"{place}/linked",
        "/etc/passwd",
        "/etc",
        "/proc/self/environ",
        "/dev/zero",
        "~",
        "gpt2",
        "a/b",
        ".",
    ]


def filled(draw: random.Random, template: str, place: Path) -> str:
    return template.format(p=draw.choice(paths(place)), n=draw.choice([0, -1, 3, 10**12, "'x'"]), t=draw.choice(TEXTS))


def storm_of_files(server: Server, place: Path, count: int, seed: int) -> None:
    draw = random.Random(seed)
    for number in range(count):
        if draw.random() < 0.5:
            text = filled(draw, draw.choice(_RECIPES), place)
            edits = [[draw.choice(("model.path", "data.train", "a.b.c", "model", "")), draw.choice(TEXTS)]]
            asked: dict[str, Any] = {"text": text, "edits": edits if draw.random() < 0.3 and edits[0][0] else []}
            answer = server.ask(f"/api/{draw.choice(('recipe', 'archive'))}", asked)
        else:
            names = [
                draw.choice(("a.yaml", "b.json", "c.sh", "../../x", "/etc/passwd", "", ".", "a\0b", "x" * 400))
                for _ in range(2)
            ]
            asked = {"files": {name: filled(draw, draw.choice(_CONFIGS), place) for name in names}, "to": "zero3"}
            answer = server.ask(f"/api/{draw.choice(('check', 'fix', 'migrate', 'import'))}", asked)
        fine(answer, (seed, number, asked))
        assert b"failed inside the toolkit" not in answer.body, (seed, number, asked, answer.body)


def test_hostile_files(local: Server, public: Server, place: Path) -> None:
    storm_of_files(local, place, 250, 0)
    storm_of_files(public, place, 150, 1)


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_thousands_of_hostile_files(local: Server, public: Server, place: Path) -> None:
    storm_of_files(local, place, 3000, 10)
    storm_of_files(public, place, 2000, 11)


def test_a_bomb_of_aliases_takes_no_time(public: Server) -> None:
    bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    )
    found = public.ask("/api/recipe", {"text": bomb}).json()
    assert found["problems"]


def test_a_task_that_takes_too_long_is_ended_and_the_next_is_answered(public: Server) -> None:
    light = public.studio.light
    with pytest.raises(Exception, match="longer than 0 s"):
        public.run(light.call("check", {"files": {"a.yaml": "x: 1"}}, 1e-6))
    assert public.ask("/api/explain", {"code": "DS101"}).json()["code"] == "DS101"


def test_reports_outside_and_of_others_are_not_shown(local: Server, place: Path) -> None:
    ours = "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>a &lt;b&gt;</title></head>x"
    (place / "ours.html").write_text(ours)
    (place / "theirs.html").write_text("<script>alert(1)</script>")
    (place.parent / "outside.html").write_text(ours + SECRET)
    assert [one["title"] for one in local.ask("/api/reports", {}).json()["reports"]] == ["a <b>"]
    shown = local.ask("/report", query=b"file=ours.html")
    assert shown.status == 200
    assert shown.headers["content-security-policy"].endswith("sandbox")
    assert "script-src" not in shown.headers["content-security-policy"]
    for name in ("theirs.html", "../outside.html", "linked/outside.html", str(place.parent / "outside.html"), "."):
        assert local.ask("/report", query=f"file={name}".encode()).status == 404, name
