"""What every request passes before the app sees it: host, origin, token, size and time; and every answer's headers.

A page that another site shows cannot reach the server: DNS rebinding shows in the Host header, a request of another
origin in Origin and Sec-Fetch-Site, and neither knows the token.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qsl, urlencode

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_BODY = 2 << 20
MAX_PATH, MAX_QUERY = 1024, 4096
BODY_SECONDS = 20.0
log = logging.getLogger("toolkit.studio")

# style-src-attr: bars and charts have their widths and colours in style attributes, which run nothing.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; style-src-attr 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-src 'self'; frame-ancestors {framers}"
)
# A report is a page of its own, with its style inside and no script.
REPORT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'self'; sandbox"
)
# A refusal's style is inside it: whoever has no token gets no file.
_ALONE = "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"


class Refused(Exception):
    """A request that is not answered; ``status`` and a sentence for the page. ``steps``: what a person at a browser can
    do; ``asks``: whether the token can be typed there."""

    def __init__(self, status: int, why: str, steps: Sequence[str] = (), asks: bool = False) -> None:
        super().__init__(why)
        self.status, self.why, self.steps, self.asks = status, why, tuple(steps), asks


@dataclass(frozen=True)
class Rules:
    """``token``: None in public mode. ``hosts``: accepted Host headers, with port; empty: any (public mode behind a
    proxy). ``framers``: who may show the pages in a frame, as CSP source list. ``cookie``: its name."""

    token: str | None
    hosts: frozenset[str]
    framers: str = "'none'"
    cookie: str = "toolkit-studio"


class Gate:
    """ASGI middleware that applies ``Rules``."""

    def __init__(self, app: App, rules: Rules, page: Callable[[Refused], str]) -> None:
        """``page``: the HTML of a refusal, for a browser that opens a page."""
        self.app, self.rules, self.page = app, rules, page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        answer, headers = _Answer(send, self.rules), _headers(scope)
        try:
            self._check(scope, headers)
            if (place := self._arriving(scope)) is not None:
                await answer.redirect(place, f"{self.rules.cookie}={self.rules.token}")
                return
            self._check_token(headers)
            body = await _body(receive, headers)
            await self.app(scope, _replayed(body, receive), answer)
        except Refused as refused:
            if scope["method"] == "GET" and "text/html" in ",".join(headers.get("accept", [])):
                await answer.html(refused.status, self.page(refused))
            else:
                await answer.plain(refused.status, refused.why)
        except Exception:
            log.exception("%s %s", scope.get("method"), scope.get("path"))
            await answer.plain(500, "An internal error. The server's terminal shows it.")

    def _check(self, scope: Scope, headers: dict[str, list[str]]) -> None:
        if scope["method"] not in ("GET", "HEAD", "POST"):
            raise Refused(405, "This server answers GET and POST.")
        if len(scope["path"]) > MAX_PATH or len(scope["query_string"]) > MAX_QUERY:
            raise Refused(414, "The address is too long.")
        host = headers.get("host", [])
        if len(host) != 1:
            raise Refused(400, "Exactly one Host header is expected.")
        if self.rules.hosts and host[0].lower() not in self.rules.hosts:
            known = " or ".join(f"http://{name}/" for name in sorted(self.rules.hosts))
            raise Refused(421, "This server does not answer to that host name.", [
                f"Open it as {known}.",
                "If it runs on another machine, forward its port from yours (ssh -L PORT:127.0.0.1:PORT MACHINE) "
                "and open the address that toolkit studio printed.",
                "Or start it with the name or address that you type here: toolkit studio --host NAME.",
            ])  # fmt: skip
        for origin in headers.get("origin", []):
            if origin.lower() not in (f"http://{host[0].lower()}", f"https://{host[0].lower()}"):
                raise Refused(403, "Requests of other origins are refused.")
        # A link from elsewhere may open a page, nothing else.
        opens_page = scope["method"] == "GET" and headers.get("sec-fetch-mode") == ["navigate"]
        for site in headers.get("sec-fetch-site", []):
            if site not in ("same-origin", "none") and not opens_page:
                raise Refused(403, "Requests of other sites are refused.")
        if scope["method"] == "POST":
            kind = headers.get("content-type", [""])[0].partition(";")[0].strip().lower()
            if kind != "application/json":
                raise Refused(415, "JSON is expected.")

    def _arriving(self, scope: Scope) -> str | None:
        """The address without its token, for a visit with the right one."""
        if self.rules.token is None or scope["method"] != "GET" or b"token=" not in scope["query_string"]:
            return None
        pairs = parse_qsl(scope["query_string"].decode("latin-1"))
        given = dict(pairs).get("token", "")
        if not _same(given, self.rules.token):
            raise Refused(403, "The token in this address is not this server's.", _CLOSED_STEPS, asks=True)
        rest = urlencode([(key, value) for key, value in pairs if key != "token"])
        path = "/" + scope["path"].lstrip("/\\")  # never another host's address
        return _as_header(path) + (f"?{rest}" if rest else "")

    def _check_token(self, headers: dict[str, list[str]]) -> None:
        if self.rules.token is None:
            return
        found = [value.removeprefix("Bearer ") for value in headers.get("authorization", [])]
        for line in headers.get("cookie", []):
            try:
                cookie = SimpleCookie(line).get(self.rules.cookie)
            except CookieError:
                continue
            found += [cookie.value] if cookie is not None else []
        if not any(_same(value, self.rules.token) for value in found):
            raise Refused(
                403, "Open the address that toolkit studio printed: it has the token.", _CLOSED_STEPS, asks=True
            )


_CLOSED_STEPS = (
    "In the terminal where toolkit studio runs, look for the line that begins with toolkit studio http://, and open "
    "that address. This browser then remembers the token.",
    "Is the terminal gone? Start toolkit studio again with the same folders: the token stays the same.",
    "Another server may have taken the port: each one has a token of its own.",
)


def _same(a: str, b: str) -> bool:
    return hmac.compare_digest(a.encode("utf-8", "surrogateescape"), b.encode())


def _headers(scope: Scope) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in scope["headers"]:
        found.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
    return found


async def _body(receive: Receive, headers: dict[str, list[str]]) -> bytes:
    """The whole body, within the limits of size and time."""
    length = headers.get("content-length", ["0"])[0]
    if not length.isascii() or not length.isdigit() or len(length) > 12:
        raise Refused(400, "Content-Length is not a number.")
    if int(length) > MAX_BODY:
        raise Refused(413, f"More than {MAX_BODY >> 20} MiB.")
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Refused(400, "The connection was closed.")
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > MAX_BODY:
                    raise Refused(413, f"More than {MAX_BODY >> 20} MiB.")
                if not message.get("more_body"):
                    return b"".join(parts)
    except TimeoutError:
        raise Refused(408, "The request took too long to arrive.") from None


def _replayed(body: bytes, receive: Receive) -> Receive:
    sent = False

    async def again() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _as_header(path: str) -> str:
    from urllib.parse import quote

    return quote(path, safe="/-_.~")


class _Answer:
    """``send`` with the security headers of every answer."""

    def __init__(self, send: Send, rules: Rules) -> None:
        self._send, self._rules, self._started = send, rules, False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._started = True
            given = {name.lower() for name, _ in message.get("headers", [])}
            own = [(name, value) for name, value in self._headers() if name not in given]
            message = dict(message) | {"headers": [*message.get("headers", []), *own]}
        await self._send(message)

    def _headers(self) -> list[tuple[bytes, bytes]]:
        rows = {
            "content-security-policy": _POLICY.format(framers=self._rules.framers),
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cross-origin-resource-policy": "same-origin",
            "cross-origin-opener-policy": "same-origin",
            "permissions-policy": "camera=(), microphone=(), geolocation=()",
            "cache-control": "no-store",
        }
        if self._rules.framers == "'none'":
            rows["x-frame-options"] = "DENY"
        return [(name.encode(), value.encode()) for name, value in rows.items()]

    async def html(self, status: int, text: str) -> None:
        """A page that needs nothing else of the server."""
        policy = (b"content-security-policy", _ALONE.encode())
        await self.plain(status, text, (policy,), kind=b"text/html; charset=utf-8")

    async def plain(
        self,
        status: int,
        text: str,
        headers: tuple[tuple[bytes, bytes], ...] = (),
        kind: bytes = b"text/plain; charset=utf-8",
    ) -> None:
        if self._started:
            return
        body = text.encode()
        size = (b"content-length", str(len(body)).encode())
        await self(
            {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind), size, *headers]}
        )
        await self._send({"type": "http.response.body", "body": body})

    async def redirect(self, place: str, cookie: str) -> None:
        kept = f"{cookie}; HttpOnly; SameSite=Strict; Path=/"
        await self.plain(303, "", ((b"location", place.encode("latin-1")), (b"set-cookie", kept.encode())))
