"""An app with its gate, asked as a server would ask it: without a socket, so that thousands of requests are quick."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolkit.studio.app import Studio
from toolkit.studio.gate import Gate

HOST = "127.0.0.1:8717"
TOKEN = "t" * 32
SECRET = "the-secret-of-another-folder"


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Server:
    """``ask`` sends one request, as a page of the server does unless asked otherwise."""

    studio: Studio
    app: Gate
    loop: asyncio.AbstractEventLoop
    headers: dict[str, str] = field(default_factory=dict)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    def ask(self, *request: Any, **how: Any) -> Answer:
        return self.run(self.asked(*request, **how))

    async def asked(
        self,
        path: str,
        values: Any = None,
        *,
        method: str | None = None,
        query: bytes = b"",
        headers: Sequence[tuple[str, str]] | None = None,
        body: bytes | None = None,
    ) -> Answer:
        posted = values is not None or body is not None
        data = body if body is not None else b"" if values is None else json.dumps(values).encode()
        given = list(self.headers.items()) if headers is None else list(headers)
        if posted and headers is None:
            given += [
                ("content-type", "application/json"),
                ("origin", f"http://{HOST}"),
                ("content-length", str(len(data))),
            ]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "http",
            "root_path": "",
            "method": method or ("POST" if posted else "GET"),
            "path": path,
            "raw_path": path.encode("utf-8", "replace"),
            "query_string": query,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8717),
            "headers": [(k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in given],
        }
        sent: list[dict[str, Any]] = []
        parts = [{"type": "http.request", "body": data, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if parts:
                return parts.pop()
            await asyncio.sleep(3600)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(dict(message))

        await self.app(scope, receive, send)
        head = sent[0]
        return Answer(
            head["status"],
            {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in head["headers"]},
            b"".join(m.get("body", b"") for m in sent[1:]),
        )


def contrast(a: str, b: str) -> float:
    """WCAG's contrast of two colours, as `rgb(r, g, b)`."""

    def light(colour: str) -> float:
        parts = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((light(a), light(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)
