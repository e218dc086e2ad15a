"""Who is answered, and what every answer says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from cases import every_case
from studio_server import HOST, TOKEN, Server
from toolkit.studio.gate import MAX_BODY, Refused, _body

COOKIE = ("cookie", f"toolkit-studio={TOKEN}")


@pytest.fixture(scope="module")
def local(make_server: Callable[..., Server], place: Path) -> Server:
    """Nothing that is asked of it here needs a worker process."""
    return make_server([place])


@pytest.fixture(scope="module")
def public(make_server: Callable[..., Server]) -> Server:
    return make_server(public=True)


def test_a_page_is_shown_with_the_token_and_its_policy(local: Server) -> None:
    answer = local.ask("/build")
    assert answer.status == 200
    assert b"toolkit <b>studio</b>" in answer.body
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "script-src 'self' 'unsafe-inline'" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["x-frame-options"] == "DENY"


def test_the_address_with_the_token_becomes_a_cookie(local: Server) -> None:
    answer = local.ask("/build", query=f"token={TOKEN}&view=plan".encode(), headers=[("host", HOST)])
    assert (answer.status, answer.headers["location"]) == (303, "/build?view=plan")
    assert answer.headers["set-cookie"].startswith(f"toolkit-studio={TOKEN}; HttpOnly; SameSite=Strict")


def test_a_path_of_another_host_is_no_way_out_of_the_redirect(local: Server) -> None:
    answer = local.ask("//evil.example/x", query=f"token={TOKEN}".encode(), headers=[("host", HOST)])
    assert answer.headers["location"] == "/evil.example/x"


@every_case(
    "headers",
    [
        [("host", HOST)],
        [("host", HOST), ("cookie", "toolkit-studio=" + "x" * 32)],
        [("host", HOST), ("cookie", "toolkit-studio=")],
        [("host", HOST), ("cookie", f"other={TOKEN}")],
        [("host", HOST), ("authorization", "Bearer ")],
        [("host", HOST), ("cookie", "toolkit-studio=é")],
    ],
)
def test_nothing_without_the_token(local: Server, headers: list[tuple[str, str]]) -> None:
    for path in ("/build", "/static/build.js", "/api/runs", "/report"):
        answer = local.ask(path, headers=headers)
        assert answer.status == 403, path
        assert b"token" in answer.body


PAGE = ("accept", "text/html,application/xhtml+xml,*/*;q=0.8")
CLOSED = {
    "no token": (403, [("host", HOST)], b"", "Open the address that toolkit studio printed: it has the token."),
    "wrong token": (403, [("host", HOST)], b"token=x", "The token in this address is not this server&#39;s."),
    "other host": (421, [("host", "<b>evil.example"), COOKIE], b"", "This server does not answer to that host name."),
}


@pytest.mark.parametrize("kind", CLOSED)
def test_a_browser_that_is_refused_gets_a_page_that_says_what_to_do(kind: str, local: Server) -> None:
    status, headers, query, why = CLOSED[kind]
    answer = local.ask("/build", query=query, headers=[*headers, PAGE])
    text = answer.body.decode()
    assert (answer.status, answer.headers["content-type"]) == (status, "text/html; charset=utf-8")
    assert f"<h1>{why}</h1>" in text
    assert text.count("<li>") == 3
    assert ('name="token"' in text) == (kind != "other host")
    assert ("http://127.0.0.1:8717/" in text) == (kind == "other host")
    assert TOKEN not in text
    assert "evil" not in text
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'" in policy
    assert "script" not in policy + text, "it needs nothing else of a server that does not answer"
    assert "<link" not in text
    assert (
        local.ask("/api/runs", headers=[("host", HOST), ("accept", "*/*")])
        .headers["content-type"]
        .startswith("text/plain")
    )


@every_case("host", ["evil.example", "evil.example:8717", "127.0.0.1:9999", "127.0.0.1", "", "localhost:1"])
def test_other_hosts_are_refused(local: Server, host: str) -> None:
    """DNS rebinding: the browser sends the attacker's name, with the cookie of that name."""
    assert local.ask("/build", headers=[("host", host), COOKIE]).status == 421
    assert local.ask("/build", headers=[("host", HOST), ("host", host), COOKIE]).status == 400


@every_case("origin", ["http://evil.example", "null", "http://127.0.0.1:9999", "https://127.0.0.1", ""])
def test_other_origins_are_refused(local: Server, origin: str) -> None:
    headers = [("host", HOST), COOKIE, ("origin", origin), ("content-type", "application/json")]
    assert local.ask("/api/runs", body=b"{}", headers=headers).status == 403


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_other_sites_may_open_a_page_and_nothing_else(local: Server, site: str) -> None:
    own = [("host", HOST), COOKIE, ("sec-fetch-site", site)]
    assert local.ask("/build", headers=[*own, ("sec-fetch-mode", "navigate")]).status == 200
    assert local.ask("/static/build.js", headers=[*own, ("sec-fetch-mode", "no-cors")]).status == 403
    posted = [*own, ("content-type", "application/json"), ("sec-fetch-mode", "navigate")]
    assert local.ask("/api/runs", body=b"{}", headers=posted).status == 403


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_forms_are_refused(local: Server, kind: str) -> None:
    """What a form of another page can send without asking."""
    assert local.ask("/api/runs", body=b"{}", headers=[("host", HOST), COOKIE, ("content-type", kind)]).status == 415


@every_case("method", ["PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PATCH", "get"])
def test_other_methods_are_refused(local: Server, method: str) -> None:
    assert local.ask("/build", method=method).status == 405


def test_a_large_body_is_refused(local: Server) -> None:
    answer = local.ask("/api/recipe", body=b'{"text":"' + b"x" * MAX_BODY + b'"}')
    assert answer.status == 413
    own = [("host", HOST), COOKIE, ("content-type", "application/json")]
    for word in (str(10**11), "-1", "1e3", "x", "9" * 400):
        assert local.ask("/api/recipe", body=b"{}", headers=[*own, ("content-length", word)]).status in (400, 413)


def test_a_body_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.studio.gate.BODY_SECONDS", 0.05)

    async def drip() -> dict[str, object]:
        await asyncio.sleep(0.02)
        return {"type": "http.request", "body": b"x", "more_body": True}

    with pytest.raises(Refused) as refused:
        asyncio.run(_body(drip, {}))
    assert refused.value.status == 408


def test_the_public_server_has_no_files_and_no_runs(public: Server) -> None:
    assert public.ask("/build").status == 200
    assert b'href="/runs"' not in public.ask("/build").body
    for path in ("/runs", "/data", "/reports", "/report", "/api/runs"):
        assert public.ask(path).status == 404, path
    for name in ("runs", "run", "log", "start", "stop", "resume", "data", "reports", "open"):
        assert public.ask(f"/api/{name}", {"name": "/etc/passwd", "names": ["/"]}).status == 404, name


def test_an_error_of_the_app_shows_no_traceback(local: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise RuntimeError("Traceback (most recent call last)")

    monkeypatch.setattr(local.app, "app", broken)
    answer = local.ask("/build")
    assert answer.status == 500
    assert b"Traceback" not in answer.body
